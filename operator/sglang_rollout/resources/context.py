"""What the children of every fleet need to know about the operator that makes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..protocol.fleet import Trust


@dataclass(frozen=True)
class FleetContext:
    """operator_namespace, operator_pod_labels: where connections to agents and router sidecars come from;
    agent_image, router_image: used where the resource names none;
    trust: whom the pods of this fleet obey (its audience carries the resource's UID)."""

    operator_namespace: str
    operator_pod_labels: Mapping[str, str]
    agent_image: str
    router_image: str
    trust: Trust
