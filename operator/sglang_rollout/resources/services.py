"""Services: one headless Service an engine, one over all ready engines, one for the router."""

from __future__ import annotations

from collections.abc import Mapping

from ..api import SGLangRollout
from ..api.names import (
    COMPONENT_ENGINE,
    COMPONENT_ROUTER,
    LABEL_COMPONENT,
    LABEL_FLEET,
    LABEL_RANK,
    engine_labels,
    engine_name,
    engines_service_name,
    fleet_labels,
    router_labels,
    router_name,
)
from ..protocol.pod import AGENT_PORT, ENGINE_PORT, ROUTER_METRICS_PORT, ROUTER_PORT
from .identity import Manifest, child
from .stateful_set import engine_selector


def headless_service(rollout: SGLangRollout, index: int) -> Manifest:
    """Names of an engine's pods. They resolve before the pods are ready: ranks meet before any of them serves."""
    fleet = rollout.metadata.name
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": engine_selector(fleet, index),
        "ports": [_port("http", ENGINE_PORT), _port("agent", AGENT_PORT)],
    }
    return child(rollout, "v1", "Service", engine_name(fleet, index), engine_labels(fleet, index), spec=spec)


def engines_service(rollout: SGLangRollout) -> Manifest:
    """The rank-0 pods of all ready engines, for who holds their keys."""
    fleet = rollout.metadata.name
    selector = {LABEL_FLEET: fleet, LABEL_COMPONENT: COMPONENT_ENGINE, LABEL_RANK: "0"}
    labels = {**fleet_labels(fleet), LABEL_COMPONENT: COMPONENT_ENGINE}
    return child(
        rollout, "v1", "Service", engines_service_name(fleet), labels, spec=_spec(selector, ("http", ENGINE_PORT))
    )


def router_service(rollout: SGLangRollout) -> Manifest:
    """What clients use."""
    fleet = rollout.metadata.name
    selector = {LABEL_FLEET: fleet, LABEL_COMPONENT: COMPONENT_ROUTER}
    spec = _spec(selector, ("http", ROUTER_PORT), ("metrics", ROUTER_METRICS_PORT))
    return child(rollout, "v1", "Service", router_name(fleet), router_labels(fleet), spec=spec)


def _spec(selector: Mapping[str, str], *ports: tuple[str, int]) -> Manifest:
    return {"type": "ClusterIP", "selector": dict(selector), "ports": [_port(name, number) for name, number in ports]}


def _port(name: str, number: int) -> Manifest:
    return {"name": name, "port": number, "targetPort": name, "protocol": "TCP", "appProtocol": "http"}
