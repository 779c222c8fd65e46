"""Environment variables of containers, as core/v1 EnvVar."""

from __future__ import annotations

from typing import Any

from ..api import SGLangRollout
from ..api.names import LABEL_RANK
from ..protocol.pod import ENV_FLEET, ENV_NAMESPACE, ENV_POD_IP, ENV_POD_NAME, ENV_POD_UID, ENV_RANK


def literal(name: str, value: object) -> dict[str, Any]:
    return {"name": name, "value": str(value)}


def from_field(name: str, path: str) -> dict[str, Any]:
    """A field of the pod itself (downward API)."""
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def pod_identity(rollout: SGLangRollout) -> list[dict[str, Any]]:
    """Which pod of which fleet a process is in."""
    return [
        literal(ENV_NAMESPACE, rollout.metadata.namespace),
        literal(ENV_FLEET, rollout.metadata.name),
        from_field(ENV_POD_NAME, "metadata.name"),
        from_field(ENV_POD_UID, "metadata.uid"),
        from_field(ENV_POD_IP, "status.podIP"),
    ]


def rank() -> dict[str, Any]:
    """The pod's index in its StatefulSet."""
    return from_field(ENV_RANK, f"metadata.labels['{LABEL_RANK}']")
