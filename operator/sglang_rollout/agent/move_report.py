"""What is reported of a weight move: how far it is by what is so now, not by what was done."""

from __future__ import annotations

from sglang_rollout.protocol.report import EngineState, MoveReport
from sglang_rollout.protocol.weights import Step

from .plan import repairable
from .situation import Situation, weaker

UNKNOWN_BYTES = "an apply was begun and not read back"


def reached(situation: Situation) -> Step:
    move, progress = situation.move, situation.progress
    if move is None or progress is None or situation.facts.state is not EngineState.SERVING:
        return Step.NONE
    prepared = min(Step.PREPARE, move.until) if progress.prepared else Step.NONE
    if situation.dirty and not lost(situation) and situation.pause is not None:
        # It stands at the barrier while it applies: falling behind it would call the whole fleet back.
        return min(Step.PAUSE, move.until)
    if situation.dirty or progress.given_up:
        return prepared
    if situation.rank > 0:
        return move.until if progress.prepared else Step.NONE
    held = situation.pause is not None
    if situation.at_target:
        if progress.continued or (move.until is Step.CONTINUE and situation.asked_level_holds):
            return Step.CONTINUE
        if move.until is Step.CONTINUE or held:
            return Step.APPLY
        return Step.PREPARE
    if held and prepared and situation.ready_to_apply and not weaker(situation.pause, situation.move_mode):
        return min(Step.PAUSE, move.until)
    return prepared


def lost(situation: Situation) -> bool:
    """Bytes of no known version, and no order to repeat the apply that left them."""
    return situation.dirty and not situation.applying and not repairable(situation)


def move_report(situation: Situation) -> MoveReport | None:
    move, progress = situation.move, situation.progress
    if move is None or progress is None:
        # Without an order there is nothing to repeat: it must be known all the same that no version is in there.
        return MoveReport(situation.open_move, error=UNKNOWN_BYTES, dirty=True) if lost(situation) else None
    without_hope = lost(situation)
    # An error beside `dirty: false` says that the old weights serve: never while an apply is being repeated.
    problem = progress.error or progress.problem or UNKNOWN_BYTES
    return MoveReport(
        id=move.id,
        reached=reached(situation),
        error=problem if without_hope else "" if situation.dirty else progress.error,
        refused=progress.refused and not situation.dirty,
        dirty=without_hope,
        aborted=progress.aborted and situation.level_holds,
        prepare_seconds=progress.prepare_seconds,
        stall_seconds=progress.stall_seconds,
        root=progress.root if progress.prepared else "",
        staged_bytes=progress.done_bytes,
        of_bytes=progress.of_bytes,
        nonfinite=progress.nonfinite,
    )


def prepare_report(situation: Situation) -> MoveReport | None:
    """Of what is staged ahead."""
    order, progress = situation.desired.prepare, situation.ahead
    if order is None or progress is None:
        return None
    return MoveReport(
        id=order.id,
        reached=Step.PREPARE if progress.prepared else Step.NONE,
        error=progress.error,
        refused=progress.refused,
        prepare_seconds=progress.prepare_seconds,
        root=progress.root if progress.prepared else "",
        staged_bytes=progress.done_bytes,
        of_bytes=progress.of_bytes,
        nonfinite=progress.nonfinite,
    )
