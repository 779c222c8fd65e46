"""spec.network: how the engines' pods are reached."""

from __future__ import annotations

from pydantic import Field

from .kubernetes_types import NetworkPolicyPeer
from .schema import ApiModel, list_type


class Network(ApiModel):
    """How the engines' pods are reached."""

    host_network: bool = Field(default=False, description="Whether engine pods use the network of their node.")
    trainers: tuple[NetworkPolicyPeer, ...] = Field(
        default=(),
        max_length=32,
        json_schema_extra=list_type("atomic"),
        description="Who, beside operator and router, the NetworkPolicies let in to agents and engines.",
    )
