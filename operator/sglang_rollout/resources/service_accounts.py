"""ServiceAccounts of engine and router pods: names to hang policies on, with no rights and no mounted token."""

from __future__ import annotations

from ..api import SGLangRollout
from ..api.names import (
    COMPONENT_ENGINE,
    COMPONENT_ROUTER,
    LABEL_COMPONENT,
    engine_service_account_name,
    fleet_labels,
    router_service_account_name,
)
from .identity import Manifest, child


def engine_service_account(rollout: SGLangRollout) -> Manifest:
    return _account(rollout, engine_service_account_name(rollout.metadata.name), COMPONENT_ENGINE)


def router_service_account(rollout: SGLangRollout) -> Manifest:
    return _account(rollout, router_service_account_name(rollout.metadata.name), COMPONENT_ROUTER)


def _account(rollout: SGLangRollout, name: str, component: str) -> Manifest:
    labels = {**fleet_labels(rollout.metadata.name), LABEL_COMPONENT: component}
    return child(rollout, "v1", "ServiceAccount", name, labels, automountServiceAccountToken=False)
