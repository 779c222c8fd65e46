"""A move of the fleet before its decision: engines check the checkpoint, and what they say adds up to one answer."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from ..api import Spec, WeightsStatus
from ..api.conditions import seconds_left, timestamp
from ..api.status import WeightTransaction
from ..protocol.report import EngineState
from ..protocol.weights import Step, WeightVersion
from .engines import EngineView
from .planned import EventNote
from .weight_steps import RETRY_SECONDS, WeightsPlan, move_order, settle


def prepare(
    members: list[EngineView],
    spec: Spec,
    weights: WeightsStatus,
    target: WeightVersion,
    generation: int,
    now: datetime,
    routers_in_step: bool,
) -> WeightsPlan:
    """The next step towards a decision about `target`. routers_in_step: of the engines that may serve now."""
    transaction = weights.transaction
    # A change of something else does not begin an open move anew: that would be for ever, if changes are frequent.
    same = transaction is not None and (transaction.version, transaction.path) == (target.version, target.path)
    if transaction is None or not same or (transaction.completed_at and transaction.generation != generation):
        transaction = _new_transaction(target, generation, 1, now)
        if reason := _relabelled(weights, target):
            return _fail(members, spec, weights, transaction, reason, now)
        note = EventNote("Normal", "WeightsStaging", f"preparing version {target.version} from {target.path}")
        return _preparing(members, spec, weights, transaction, "Staging", now, (note,))
    if transaction.completed_at is not None:
        wait = seconds_left(transaction.completed_at, RETRY_SECONDS, now)
        if wait > 0:
            plan = settle(members, spec, weights, "Failed", now)
            return replace(plan, wake=wait if plan.wake is None else min(wait, plan.wake))
        again = _new_transaction(target, generation, _attempt(transaction) + 1, now)
        if _relabelled(weights, target):
            return replace(settle(members, spec, weights, "Failed", now), wake=None)
        # The reason of the last failure stays in sight while it is tried again.
        again = again.model_copy(update={"message": transaction.message})
        return _preparing(members, spec, weights, again, "Failed", now, ())
    return _judge(members, spec, weights, transaction, now, routers_in_step)


def _judge(
    members: list[EngineView],
    spec: Spec,
    weights: WeightsStatus,
    transaction: WeightTransaction,
    now: datetime,
    routers_in_step: bool,
) -> WeightsPlan:
    """What the reports of the preparing engines add up to."""
    candidates = [engine for engine in members if engine.healthy]
    refusals = [engine.move_error(transaction.id) for engine in candidates if engine.move_refused(transaction.id)]
    if refusals:
        return _fail(members, spec, weights, transaction, refusals[0], now)
    prepared = [engine for engine in candidates if engine.progress(transaction.id) >= Step.PREPARE]
    transaction = transaction.model_copy(update={"prepared": len(prepared)})
    left = seconds_left(transaction.started_at, spec.weights.timeout_seconds, now)
    if candidates and len(prepared) == len(candidates):
        return _decide(members, spec, weights, transaction, now, routers_in_step)
    if not candidates and not any(_is_coming(engine) for engine in members):
        return _decide(members, spec, weights, transaction, now, routers_in_step)
    if left <= 0:
        if prepared:
            return _decide(members, spec, weights, transaction, now, routers_in_step)
        errors = [engine.move_error(transaction.id) for engine in candidates if engine.move_error(transaction.id)]
        reason = errors[0] if errors else "no engine was ready to prepare it in time"
        return _fail(members, spec, weights, transaction, reason, now)
    phase = "Failed" if _attempt(transaction) > 1 else "Staging"
    return replace(_preparing(members, spec, weights, transaction, phase, now, ()), wake=left)


def _relabelled(weights: WeightsStatus, target: WeightVersion) -> str:
    """Why this label cannot be used for these bytes: it was used for others, and engines or a trainer's records may
    still know it as those. Empty: it can."""
    other = [e.path for e in weights.history if e.version == target.version and e.path not in ("", target.path)]
    if not other:
        return ""
    return f"version {target.version} was served from {other[0]}: give {target.path} a label of its own"


def _preparing(
    members: list[EngineView],
    spec: Spec,
    weights: WeightsStatus,
    transaction: WeightTransaction,
    phase: str,
    now: datetime,
    events: tuple[EventNote, ...],
) -> WeightsPlan:
    settled = settle(members, spec, weights, phase, now, busy=transaction)
    moves = {
        engine.index: move_order(spec, transaction, Step.PREPARE)
        for engine in members
        if engine.healthy and engine.index not in settled.moves
    }
    return replace(settled, moves={**settled.moves, **moves}, events=events)


def _decide(
    members: list[EngineView],
    spec: Spec,
    weights: WeightsStatus,
    transaction: WeightTransaction,
    now: datetime,
    routers_in_step: bool,
) -> WeightsPlan:
    rolling = spec.weights.update_strategy.type == "Rolling"
    parting = _left_behind(members, spec, weights, transaction) if rolling else frozenset()
    if rolling and not routers_in_step:
        # The decision takes an allowed version away: what no router may have after it must have left them before.
        waiting = _preparing(members, spec, weights, transaction, "Prepared", now, ())
        return replace(waiting, parting=parting)
    decided = transaction.model_copy(update={"decision": "Commit", "decided_at": timestamp(now), "message": ""})
    plan = _preparing(members, spec, weights, decided, "Committing", now, ())
    note = EventNote("Normal", "WeightsCommitting", f"{transaction.prepared} engines move to {transaction.version}")
    status = plan.status
    if rolling:
        # Both versions serve while the waves go on: the old one is behind by one from now.
        status = status.with_committed(transaction.version, transaction.path, now)
    return replace(plan, status=status, decision=True, parting=parting, events=(note,), wake=0.0)


def _left_behind(
    members: list[EngineView], spec: Spec, weights: WeightsStatus, transaction: WeightTransaction
) -> frozenset[int]:
    """Engines that may serve now and will be further behind than is allowed once this version is committed."""
    return frozenset(
        engine.index
        for engine in members
        if engine.version != transaction.version
        and (weights.lag(engine.version) or 0) + 1 > spec.staleness.max_version_lag
    )


def _fail(
    members: list[EngineView],
    spec: Spec,
    weights: WeightsStatus,
    transaction: WeightTransaction,
    reason: str,
    now: datetime,
) -> WeightsPlan:
    ended = transaction.model_copy(
        update={"decision": "Abort", "completed_at": timestamp(now), "message": reason[:2000]}
    )
    weights = weights.model_copy(update={"transaction": ended})
    plan = settle(members, spec, weights, "Failed", now)
    first = _attempt(transaction) == 1
    text = f"version {transaction.version} is refused, {weights.version} keeps serving: {reason}"
    events = (EventNote("Warning", "WeightsRefused", text),) if first else ()
    return replace(plan, events=events, wake=RETRY_SECONDS)


def _new_transaction(target: WeightVersion, generation: int, attempt: int, now: datetime) -> WeightTransaction:
    return WeightTransaction(
        id=f"g{generation}.{attempt}:{target.version}"[:128],
        version=target.version,
        path=target.path,
        generation=generation,
        started_at=timestamp(now),
    )


def _attempt(transaction: WeightTransaction) -> int:
    """The attempt of a transaction, from its id g<generation>.<attempt>:<version>."""
    return int(transaction.id.split(":", 1)[0].rsplit(".", 1)[1])


def _is_coming(engine: EngineView) -> bool:
    """Whether the engine is on its way up and nothing is known to be wrong with it."""
    report = engine.leader
    if report is None:
        return bool(engine.pods) and not engine.silent
    return not report.engine.failure and report.engine.state in (
        EngineState.ABSENT,
        EngineState.WAITING,
        EngineState.STARTING,
    )
