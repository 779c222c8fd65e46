"""NetworkPolicies: who may open connections to engine and router pods. What they connect to is not limited: models,
trainers and peers are anywhere. Pods on their node's network are outside all policies (Kubernetes' own rule)."""

from __future__ import annotations

from collections.abc import Mapping

from ..api import SGLangRollout
from ..api.names import (
    COMPONENT_ENGINE,
    COMPONENT_ROUTER,
    LABEL_COMPONENT,
    LABEL_FLEET,
    engine_network_policy_name,
    fleet_labels,
    router_network_policy_name,
)
from ..protocol.pod import AGENT_PORT, ENGINE_PORT, ROUTER_METRICS_PORT, ROUTER_PORT, ROUTER_SIDECAR_PORT
from .context import FleetContext
from .identity import Manifest, child

_NAMESPACE_NAME = "kubernetes.io/metadata.name"


def engine_network_policy(rollout: SGLangRollout, context: FleetContext) -> Manifest:
    """Routers reach the engine, the operator the agent; engine pods of the fleet each other and trainers them on every
    port, since NCCL and Gloo choose theirs and either side may be the one that connects. A router that we do not run
    may be anywhere: with one, the engine's port is open, and the engine's key alone guards it."""
    ingress: list[Manifest] = [
        _rule([_pods(rollout, COMPONENT_ROUTER)], ENGINE_PORT),
        _rule([_operator(context)], AGENT_PORT),
        _rule([_pods(rollout, COMPONENT_ENGINE)]),
    ]
    if rollout.spec.router.external is not None:
        ingress[0] = _rule([], ENGINE_PORT)
    if rollout.spec.network.trainers:
        peers = [peer.to_object() for peer in rollout.spec.network.trainers]
        ingress.append(_rule(peers))
    return _policy(rollout, engine_network_policy_name(rollout.metadata.name), COMPONENT_ENGINE, ingress)


def router_network_policy(rollout: SGLangRollout, context: FleetContext) -> Manifest:
    """Everyone reaches the router and its metrics, only the operator its sidecar."""
    ingress = [_rule([], ROUTER_PORT, ROUTER_METRICS_PORT), _rule([_operator(context)], ROUTER_SIDECAR_PORT)]
    return _policy(rollout, router_network_policy_name(rollout.metadata.name), COMPONENT_ROUTER, ingress)


def _policy(rollout: SGLangRollout, name: str, component: str, ingress: list[Manifest]) -> Manifest:
    fleet = rollout.metadata.name
    return child(
        rollout,
        "networking.k8s.io/v1",
        "NetworkPolicy",
        name,
        {**fleet_labels(fleet), LABEL_COMPONENT: component},
        spec={
            "podSelector": {"matchLabels": {LABEL_FLEET: fleet, LABEL_COMPONENT: component}},
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        },
    )


def _rule(peers: list[Manifest], *ports: int) -> Manifest:
    """No peers: from anywhere. No ports: to all of them."""
    rule: Manifest = {}
    if peers:
        rule["from"] = peers
    if ports:
        rule["ports"] = [{"protocol": "TCP", "port": port} for port in ports]
    return rule


def _pods(rollout: SGLangRollout, component: str) -> Manifest:
    labels: Mapping[str, str] = {LABEL_FLEET: rollout.metadata.name, LABEL_COMPONENT: component}
    return {"podSelector": {"matchLabels": labels}}


def _operator(context: FleetContext) -> Manifest:
    return {
        "namespaceSelector": {"matchLabels": {_NAMESPACE_NAME: context.operator_namespace}},
        "podSelector": {"matchLabels": dict(context.operator_pod_labels)},
    }
