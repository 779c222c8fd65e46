"""The router's Deployment."""

from __future__ import annotations

from ..api import SGLangRollout
from ..api.names import COMPONENT_ROUTER, LABEL_COMPONENT, LABEL_FLEET, router_labels, router_name
from .context import FleetContext
from .identity import Manifest, child
from .router_pod import router_pod_template


def router_deployment(rollout: SGLangRollout, context: FleetContext) -> Manifest:
    """A new pod comes before an old one goes. Raises UnusableSpec."""
    fleet = rollout.metadata.name
    return child(
        rollout,
        "apps/v1",
        "Deployment",
        router_name(fleet),
        router_labels(fleet),
        spec={
            "replicas": rollout.spec.router.replicas,
            "revisionHistoryLimit": 2,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "selector": {"matchLabels": {LABEL_FLEET: fleet, LABEL_COMPONENT: COMPONENT_ROUTER}},
            "template": router_pod_template(rollout, context),
        },
    )
