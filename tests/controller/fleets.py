"""A resource and the objects around it, as the API server would have them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sglang_rollout.api import API_VERSION, KIND, Status
from sglang_rollout.api.conditions import ConditionType, with_condition
from sglang_rollout.controller.kinds import Object
from sglang_rollout.transitions.planned import DeleteOrder, EventNote, Plan, Rest

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def rollout(name: str = "fleet", **spec: Any) -> Object:
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name, "namespace": "ns", "uid": f"uid-{name}", "generation": 1},
        "spec": {"model": {"path": "/models/m"}, "engine": {"image": "sglang:1"}, **spec},
    }


def status(message: str = "", *, ready: bool = False, generation: int = 1, routable: int = 0) -> Status:
    conditions = with_condition(
        (), ConditionType.READY, ready, "Ready" if ready else "Waiting", message, generation=generation, now=NOW
    )
    return Status(observed_generation=generation, routable_replicas=routable, conditions=conditions)


def plan(
    status: Status,
    applies: tuple[Object, ...] = (),
    deletes: tuple[DeleteOrder, ...] = (),
    events: tuple[EventNote, ...] = (),
    **orders: Any,
) -> Plan:
    """orders: fields of Plan."""
    phase = status.weights.phase if status.weights else ""
    return Plan(lambda: Rest(status, applies, deletes, events), phase, bool(events), **orders)


def config_map(name: str = "fleet-fleet", value: str = "1", owner: str = "uid-fleet") -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": name,
            "namespace": "ns",
            "labels": {"rollout.sglang.io/fleet": "fleet", "app.kubernetes.io/managed-by": "sglang-rollout"},
            "ownerReferences": [
                {"apiVersion": API_VERSION, "kind": KIND, "name": "fleet", "uid": owner, "controller": True}
            ],
        },
        "data": {"value": value},
    }


def stateful_set(name: str = "fleet-e0", replicas: int = 1) -> Object:
    return {
        **config_map(name),
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "data": None,
        "spec": {"replicas": replicas},
    }
