"""spec.network: how the engines' pods are reached."""

from __future__ import annotations

from pydantic import Field

from .kubernetes_types import NetworkPolicyPeer
from .schema import ApiModel, list_type


class TrainerAccount(ApiModel):
    """A ServiceAccount that a trainer runs as."""

    name: str = Field(
        min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", description="Name of the account."
    )
    namespace: str | None = Field(
        default=None,
        min_length=1,
        max_length=63,
        pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
        description="Its namespace; absent: the fleet's own.",
    )


class Network(ApiModel):
    """How the engines' pods are reached."""

    host_network: bool = Field(default=False, description="Whether engine pods use the network of their node.")
    trainers: tuple[NetworkPolicyPeer, ...] = Field(
        default=(),
        max_length=32,
        json_schema_extra=list_type("atomic"),
        description="Who, beside operator and router, the NetworkPolicies let in to agents and engines.",
    )
    trainer_accounts: tuple[TrainerAccount, ...] = Field(
        default=(),
        max_length=32,
        json_schema_extra=list_type("atomic"),
        description="ServiceAccounts that may drive the engines through their agents while control is External.",
    )
