"""Names of a fleet's children and the labels that find them again. Standard library only."""

from __future__ import annotations

FIELD_MANAGER = "sglang-rollout"
FIELD_MANAGER_STATUS = "sglang-rollout-status"

LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGED_BY = "sglang-rollout"
LABEL_NAME = "app.kubernetes.io/name"
LABEL_COMPONENT = "app.kubernetes.io/component"
COMPONENT_ENGINE = "engine"
COMPONENT_ROUTER = "router"
LABEL_FLEET = "rollout.sglang.io/fleet"  # the resource's name
LABEL_ENGINE = "rollout.sglang.io/engine"  # the engine's index, as a decimal
LABEL_RANK = "apps.kubernetes.io/pod-index"  # set by Kubernetes on StatefulSet pods

ANNOTATION_TEMPLATE_HASH = "rollout.sglang.io/template-hash"  # of an engine's rendered pod template
ANNOTATION_APPLIED_HASH = "rollout.sglang.io/applied-hash"  # of the whole manifest, to skip equal applies

# Containers, for messages and log commands.
CONTAINER_INJECT = "inject"
CONTAINER_AGENT = "agent"
CONTAINER_ENGINE = "engine"
CONTAINER_ROUTER = "router"
CONTAINER_SIDECAR = "sidecar"


def engine_name(fleet: str, index: int) -> str:
    """StatefulSet, headless Service and status name of engine `index`."""
    return f"{fleet}-e{index}"


def engine_pod_name(fleet: str, index: int, rank: int) -> str:
    return f"{engine_name(fleet, index)}-{rank}"


def router_name(fleet: str) -> str:
    """Deployment and Service that clients use."""
    return f"{fleet}-router"


def engines_service_name(fleet: str) -> str:
    """Service over the rank-0 pods of all ready engines."""
    return f"{fleet}-engines"


def fleet_config_name(fleet: str) -> str:
    """ConfigMap with protocol.fleet.FleetConfig."""
    return f"{fleet}-fleet"


def engine_service_account_name(fleet: str) -> str:
    return f"{fleet}-engine"


def router_service_account_name(fleet: str) -> str:
    return f"{fleet}-router"


def disruption_budget_name(fleet: str) -> str:
    return f"{fleet}-engines"


def router_disruption_budget_name(fleet: str) -> str:
    return f"{fleet}-router"


def engine_network_policy_name(fleet: str) -> str:
    return f"{fleet}-engine"


def router_network_policy_name(fleet: str) -> str:
    return f"{fleet}-router"


def fleet_labels(fleet: str) -> dict[str, str]:
    """On every child; the selector of the operator's informers is LABEL_MANAGED_BY alone."""
    return {LABEL_MANAGED_BY: MANAGED_BY, LABEL_NAME: MANAGED_BY, LABEL_FLEET: fleet}


def engine_labels(fleet: str, index: int) -> dict[str, str]:
    return {**fleet_labels(fleet), LABEL_COMPONENT: COMPONENT_ENGINE, LABEL_ENGINE: str(index)}


def router_labels(fleet: str) -> dict[str, str]:
    return {**fleet_labels(fleet), LABEL_COMPONENT: COMPONENT_ROUTER}


def rank0_selector(fleet: str) -> str:
    """status.selector: rank-0 pods only, so that an autoscaler counts engines and not pods."""
    return f"{LABEL_FLEET}={fleet},{LABEL_COMPONENT}={COMPONENT_ENGINE},{LABEL_RANK}=0"
