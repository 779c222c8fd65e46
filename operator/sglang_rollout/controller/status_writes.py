"""Whether a new status is worth a write at once, or can wait a moment for more of its kind."""

from __future__ import annotations

from typing import Any

from .kinds import Object

QUIET_SECONDS = 0.25

_QUIET = frozenset({"readyReplicas", "routableReplicas", "router"})
_QUIET_IN_TRANSACTION = frozenset({"prepared", "committed", "message"})
_QUIET_IN_ENGINE = frozenset({"ready", "routable", "paused", "weightVersion", "message"})


def is_quiet(before: Object, after: Object) -> bool:
    """Whether the two differ in nothing but counts and messages, which change with every engine of a fleet."""
    return bool(_loud(before) == _loud(after))


def _loud(status: Object) -> Any:
    """The status without what may be told late."""
    loud = _without(status, _QUIET)
    loud["conditions"] = [_without(condition, frozenset({"message"})) for condition in status.get("conditions") or []]
    loud["engines"] = [_without(engine, _QUIET_IN_ENGINE) for engine in status.get("engines") or []]
    weights = status.get("weights")
    if weights:
        transaction = weights.get("transaction")
        loud["weights"] = {
            **weights,
            "transaction": _without(transaction, _QUIET_IN_TRANSACTION) if transaction else None,
        }
    return loud


def _without(value: Object, names: frozenset[str]) -> Object:
    return {name: part for name, part in value.items() if name not in names}
