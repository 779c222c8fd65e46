"""The fleet's ConfigMap: what every pod of a fleet must know before the operator has spoken to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .memory import LaunchOptions
from .weights import WeightVersion


def audience(resource_uid: str) -> str:
    """The audience of the tokens that the operator presents to the pods of one fleet. It carries the resource's
    UID: a token shown to the image of one tenant is worth nothing at another's."""
    return f"sglang-rollout:{resource_uid}"


@dataclass(frozen=True)
class Trust:
    """Whom the pods obey. jwks: the cluster's public keys (/openid/v1/jwks), so tokens are verified offline;
    callers: full ServiceAccount user names, system:serviceaccount:<namespace>:<name>. trainers: those that, under
    control: External, may use the engines' own routes through PATH_ENGINE, and nothing else."""

    audience: str
    issuer: str
    callers: list[str]
    jwks: dict[str, Any] = field(default_factory=dict)
    trainers: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class FleetConfig:
    """boot: what an engine loads that starts while the operator is away. Written only after a commit. launch: the flags
    that it starts with then."""

    namespace: str
    name: str
    uid: str
    boot: WeightVersion
    trust: Trust
    launch: LaunchOptions = field(default_factory=LaunchOptions)
