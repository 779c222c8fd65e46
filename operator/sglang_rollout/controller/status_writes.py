"""Whether a new status is worth a write at once, or can wait a moment for more of its kind."""

from __future__ import annotations

from ..transitions.planned import Plan
from .kinds import Object

QUIET_SECONDS = 0.25
STILL_SECONDS = 1.0  # while engines stand still: most moves are over by then

# Engines stand still between these: their decision is written, and what follows from it any leader works out anew.
BARRIERS = frozenset({"Committing", "Verifying"})
_QUIET = frozenset({"readyReplicas", "routableReplicas", "router"})
_QUIET_AT_BARRIERS = frozenset({"conditions", "executionState"})
_QUIET_IN_WEIGHTS_AT_BARRIERS = frozenset({"phase", "version", "history"})
_QUIET_IN_TRANSACTION = frozenset({"prepared", "committed", "stagedBytes", "ofBytes", "message"})
_QUIET_AHEAD = frozenset({"engines", "message"})
_QUIET_IN_ENGINE = frozenset({"ready", "routable", "paused", "weightVersion", "message"})


def only_orders_count(told: str, plan: Plan) -> bool:
    """Whether engines stand still for a move of the weights, before this plan and after it: children and status are
    looked at rarely then, for thousands of them would be compared at every step. told: the weights' phase in status."""
    if plan.phase not in BARRIERS:
        return False
    if plan.decision:
        return not plan.deletes  # those are counted in what was written with it
    return told in BARRIERS and not plan.has_news


def may_wait(before: Object, after: Object) -> float:
    """For how long after the last write the difference of the two may stay untold, in seconds."""
    if not is_quiet(before, after):
        return 0.0
    return STILL_SECONDS if _phase(before) in BARRIERS and _phase(after) in BARRIERS else QUIET_SECONDS


def is_quiet(before: Object, after: Object) -> bool:
    """Whether the two differ in nothing but counts and messages, which change with every engine of a fleet; or, while
    engines stand still for a move of the weights, in nothing but how far it has come: no write may prolong that."""
    loud_before, loud_after = _loud(before), _loud(after)
    if _phase(before) in BARRIERS and _phase(after) in BARRIERS:
        loud_before, loud_after = _loud_at_barriers(loud_before), _loud_at_barriers(loud_after)
    return bool(loud_before == loud_after)


def _phase(status: Object) -> str:
    return str((status.get("weights") or {}).get("phase", ""))


def _loud_at_barriers(loud: Object) -> Object:
    weights = _without(loud["weights"], _QUIET_IN_WEIGHTS_AT_BARRIERS)
    return {**_without(loud, _QUIET_AT_BARRIERS), "weights": weights}


def _loud(status: Object) -> Object:
    """The status without what may be told late."""
    loud = _without(status, _QUIET)
    loud["conditions"] = [_without(condition, frozenset({"message"})) for condition in status.get("conditions") or []]
    loud["engines"] = [_without(engine, _QUIET_IN_ENGINE) for engine in status.get("engines") or []]
    weights = status.get("weights")
    if weights:
        transaction, ahead = weights.get("transaction"), weights.get("prepared")
        loud["weights"] = {
            **weights,
            "transaction": _without(transaction, _QUIET_IN_TRANSACTION) if transaction else None,
            "prepared": _without(ahead, _QUIET_AHEAD) if ahead else None,
        }
    return loud


def _without(value: Object, names: frozenset[str]) -> Object:
    return {name: part for name, part in value.items() if name not in names}
