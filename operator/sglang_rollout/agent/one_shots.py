"""Which one-shot operation to begin or look after next. Each is done once for each engine process, one at a time,
between moves and never while memory is released: a check would read what is not there."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_rollout.protocol.operations import Operation, OperationKind, OperationResult
from sglang_rollout.protocol.weights import PauseMode

from .actions import Action, LookAtProfile, Operate, Pause
from .journal import OperationRecord
from .situation import Situation, weaker

INTERRUPTED = "the agent was restarted while it ran, so its outcome is not known: ask again with another requestID"


def next_step(situation: Situation) -> Action | None:
    profile = running_profile(situation.operations)
    if profile is not None and (look := _look(profile, situation)):
        return look
    if situation.moving or situation.released or _releasing(situation):
        return None
    begun = {record.operation.id for record in situation.operations}
    for operation in situation.desired.operations:
        if operation.id in begun or (operation.kind is OperationKind.PROFILE and profile is not None):
            continue
        if operation.kind is OperationKind.RESET and weaker(situation.pause, PauseMode.RETRACT):
            return Pause(PauseMode.RETRACT)  # a token of the random bytes must never be made
        return Operate(operation)
    return None


def _look(profile: OperationRecord, situation: Situation) -> Action | None:
    operation = profile.operation
    if operation not in situation.desired.operations:
        return LookAtProfile(operation, "it is no longer asked for")
    if situation.now >= profile.began_at + operation.timeout_seconds:
        within = f"within {operation.timeout_seconds:g} s"
        return LookAtProfile(operation, f"the engine did not make {operation.steps} steps {within}: is there traffic?")
    return LookAtProfile(operation) if situation.now >= situation.profile_look_at else None


def _releasing(situation: Situation) -> bool:
    return bool(situation.desired.memory and situation.desired.memory.released)


def running_profile(records: Iterable[OperationRecord]) -> OperationRecord | None:
    for record in records:
        if record.operation.kind is OperationKind.PROFILE and record.report.result is OperationResult.RUNNING:
            return record
    return None


def still_asked(records: Iterable[OperationRecord], listed: Iterable[Operation]) -> list[OperationRecord]:
    """The records to keep: of what is listed, and of a profile that has yet to be stopped."""
    ids = {operation.id for operation in listed}
    return [
        record for record in records if record.operation.id in ids or record.report.result is OperationResult.RUNNING
    ]
