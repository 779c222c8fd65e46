"""The children that a fleet has once, in the order in which they are applied: what pods need comes before the pods.
Each engine has a headless Service and a StatefulSet beside them."""

from __future__ import annotations

from ..api import SGLangRollout
from ..protocol.weights import WeightVersion
from .config_map import fleet_config_map
from .context import FleetContext
from .deployment import router_deployment
from .disruption_budgets import engine_disruption_budget, router_disruption_budget
from .identity import Manifest
from .network_policies import engine_network_policy, router_network_policy
from .service_accounts import engine_service_account, router_service_account
from .services import engines_service, router_service


def fleet_children(rollout: SGLangRollout, context: FleetContext, boot: WeightVersion) -> tuple[Manifest, ...]:
    """What a fleet has once, its router included unless that is external. Raises UnusableSpec."""
    children = [
        engine_service_account(rollout),
        fleet_config_map(rollout, context, boot),
        engine_network_policy(rollout, context),
        engines_service(rollout),
        engine_disruption_budget(rollout),
    ]
    if rollout.spec.router.external is None:
        children += [
            router_service_account(rollout),
            router_network_policy(rollout, context),
            router_service(rollout),
            router_deployment(rollout, context),
        ]
        if rollout.spec.router.replicas > 1:
            children.append(router_disruption_budget(rollout))
    return tuple(children)
