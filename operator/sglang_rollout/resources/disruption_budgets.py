"""PodDisruptionBudgets: evictions take one pod at a time."""

from __future__ import annotations

from ..api import SGLangRollout
from ..api.names import (
    COMPONENT_ENGINE,
    COMPONENT_ROUTER,
    LABEL_COMPONENT,
    LABEL_FLEET,
    disruption_budget_name,
    fleet_labels,
    router_disruption_budget_name,
)
from .identity import Manifest, child


def engine_disruption_budget(rollout: SGLangRollout) -> Manifest:
    """Over all pods of all engines: the first eviction recreates its whole engine, whose pods are then unavailable,
    so no second engine is evicted from before that one is back. Pods that are not ready may always go."""
    return _budget(rollout, disruption_budget_name(rollout.metadata.name), COMPONENT_ENGINE)


def router_disruption_budget(rollout: SGLangRollout) -> Manifest:
    return _budget(rollout, router_disruption_budget_name(rollout.metadata.name), COMPONENT_ROUTER)


def _budget(rollout: SGLangRollout, name: str, component: str) -> Manifest:
    fleet = rollout.metadata.name
    return child(
        rollout,
        "policy/v1",
        "PodDisruptionBudget",
        name,
        {**fleet_labels(fleet), LABEL_COMPONENT: component},
        spec={
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": {LABEL_FLEET: fleet, LABEL_COMPONENT: component}},
        },
    )
