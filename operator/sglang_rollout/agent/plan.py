"""What to do next with one engine: a pure function of its situation. It is asked again after every step, so a step that
was lost is simply planned again.

In this order: what is ordered to start again, or cannot be known any more, does; a dirty engine (an apply was begun
and not read back) is paused whatever is asked, and applied again; a weight move, as far as its `until` allows; memory;
one-shot operations; then the level that `execution` asks for. Only an abort of all requests waits for none of these: it
may free them.
"""

from __future__ import annotations

from sglang_rollout.protocol.desired import ExecutionState
from sglang_rollout.protocol.memory import MemoryTag
from sglang_rollout.protocol.report import TURNED_INTO_RETRACT, EngineState
from sglang_rollout.protocol.weights import PauseMode, Step

from . import one_shots, residency, restarts
from .actions import Action, Apply, Check, Continue, Flush, Nothing, Pause, Prepare
from .situation import Situation, in_place_ends_at, stronger, weaker

MAX_APPLIES = 2  # once, and once more from scratch
PREPARING = "preparing the new weights"


def next_action(situation: Situation) -> Action:
    if restart := restarts.next_step(situation):
        return restart
    if situation.facts.state is not EngineState.SERVING:
        return Nothing()
    if situation.desired.hands_off:
        return Nothing("a trainer drives this engine (control: External)")
    if situation.rank > 0:
        return _prepare(situation) or _ahead(situation) or Nothing()
    if unknown := residency.unknown(situation):
        return unknown
    if situation.now >= in_place_ends_at(situation):
        return Pause(PauseMode.RETRACT, turned=True)
    if abort := one_shots.abort_step(situation):
        return abort
    if situation.dirty:
        return _repair(situation)
    return _advance(situation) or residency.next_step(situation) or one_shots.next_step(situation) or _level(situation)


def _prepare(situation: Situation) -> Action | None:
    move, progress = situation.move, situation.progress
    if move is None or progress is None or progress.given_up or progress.prepared or move.until < Step.PREPARE:
        return None
    if progress.preparing:
        return Nothing(PREPARING)
    if situation.now < progress.retry_at:
        return Nothing(progress.problem, progress.retry_at)
    return Prepare(move)


def _ahead(situation: Situation) -> Action | None:
    """What is to be there before it is asked for, while no move has use of the stage."""
    order, progress = situation.desired.prepare, situation.ahead
    if order is None or progress is None or progress.given_up or progress.prepared or progress.preparing:
        return None
    waits = situation.background or situation.now < progress.retry_at
    moving = situation.live and not situation.at_target and situation.rank == 0
    return None if waits or moving else Prepare(order, ahead=True)


def _repair(situation: Situation) -> Action:
    """The engine is dirty: it stays paused until an apply has been read back."""
    move, progress = situation.move, situation.progress
    if situation.pause is None:
        return Pause(PauseMode.RETRACT)
    if not repairable(situation):
        return Nothing("the engine holds weights of no known version: it must be restarted or moved again")
    assert move is not None
    assert progress is not None
    if situation.now < progress.retry_at:
        return Nothing(progress.problem, progress.retry_at)
    if not progress.prepared:
        return Nothing(PREPARING) if progress.preparing else Prepare(move)
    if weaker(situation.pause, situation.move_mode):
        return Pause(situation.move_mode)
    return Apply(move) if situation.flushed else Flush(force=True)


def repairable(situation: Situation) -> bool:
    """An order to apply is there and not used up. An abort does not count: an apply that has begun is repeated."""
    move, progress = situation.move, situation.progress
    return (
        move is not None
        and progress is not None
        and move.until >= Step.APPLY
        and not progress.error
        and progress.failures < MAX_APPLIES
    )


def _advance(situation: Situation) -> Action | None:
    """The move's next step on a clean engine; None when the level of `execution` decides."""
    move, progress = situation.move, situation.progress
    if not situation.live:
        return None
    assert move is not None
    assert progress is not None
    if situation.at_target:
        if Step.PAUSE <= move.until < Step.CONTINUE and not progress.continued:
            return Pause(stronger(situation)) if situation.pause is None else Nothing(_waiting(situation))
        return None
    if action := _prepare(situation):
        # What takes long keeps nothing from happening, but for an engine at a barrier that others may have passed.
        return action if not progress.preparing or move.until is Step.APPLY else None
    if move.until is Step.APPLY and situation.now < progress.retry_at:
        # The whole fleet stands at the barrier, and others may have applied: no token of the old weights any more.
        return Nothing(progress.problem, progress.retry_at)
    if move.until < Step.PAUSE or situation.now < progress.retry_at or MemoryTag.WEIGHTS in situation.released:
        return None
    if weaker(situation.pause, stronger(situation)):
        return Pause(stronger(situation))
    if not situation.flushed:
        return Flush(force=situation.shut)
    if not situation.ready_to_apply:
        return Check(move)
    return Apply(move) if move.until >= Step.APPLY else Nothing(_waiting(situation))


def _level(situation: Situation) -> Action:
    level = _execute(situation)
    return (_ahead(situation) or level) if isinstance(level, Nothing) else level


def _execute(situation: Situation) -> Action:
    execution = situation.execution
    if execution.state is ExecutionState.PAUSED:
        if weaker(situation.pause, execution.pause_mode):
            return Pause(execution.pause_mode)
    elif situation.pause is not None:
        return Continue()
    return Nothing(_why(situation), _look_again(situation))


def _why(situation: Situation) -> str:
    """What keeps the engine from being all that is asked for, though there is nothing to do."""
    asked = situation.desired.execution
    if situation.progress is not None and situation.progress.preparing:
        return PREPARING
    if refusal := residency.refusal(situation):
        return refusal
    if situation.void:
        return f"holds no weights ({situation.void}): it stays paused until a version is moved into it"
    if situation.released and asked.state is ExecutionState.RUNNING:
        return f"stays paused: {residency.names(situation.released)} released"
    if situation.moving and MemoryTag.WEIGHTS in situation.released:
        return "the weight move waits: there is no memory for weights until they are resumed"
    return _turned(situation) if asked.state is ExecutionState.PAUSED else ""


def _waiting(situation: Situation) -> str:
    return _turned(situation) or "waiting for the fleet"


def _turned(situation: Situation) -> str:
    modes = {situation.desired.execution.pause_mode, *([situation.move.pause_mode] if situation.move else [])}
    if not situation.turned or PauseMode.IN_PLACE not in modes:
        return ""
    limit = situation.facts.watchdog_seconds
    return f"{TURNED_INTO_RETRACT}: SGLang's watchdog ends an engine that stands still for {limit:g} s"


def _look_again(situation: Situation) -> float | None:
    retry_at = situation.progress.retry_at if situation.progress and situation.live else 0.0
    looks = [retry_at, situation.operation_look_at if one_shots.going_on(situation.operations) else 0.0]
    return min((at for at in looks if at > situation.now), default=None)
