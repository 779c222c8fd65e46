"""Which one-shot operation to begin or look after next. Each is done once for each engine process, one at a time,
between moves and never while memory is released: a check would read what is not there. Only an abort of all requests
may come at any time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sglang_rollout.protocol.operations import CHECKS, Operation, OperationKind, OperationResult
from sglang_rollout.protocol.weights import PauseMode

from .actions import Action, LookAfter, Operate, Pause
from .journal import OperationRecord
from .situation import Situation, weaker

INTERRUPTED = "the agent was restarted while it ran, so its outcome is not known: ask again with another requestID"
# What is begun, lets other steps come between, and is looked at until it is over.
LASTING = frozenset({OperationKind.PROFILE, OperationKind.FLUSH})


def next_step(situation: Situation) -> Action | None:
    running = going_on(situation.operations)
    for record in running:
        if look := _look(record, situation):
            return look
    if situation.moving or situation.released or _releasing(situation):
        return None
    busy = {record.operation.kind for record in running}
    for operation in _not_begun(situation):
        if operation.kind in busy or operation.kind is OperationKind.ABORT:
            continue
        if operation.kind is OperationKind.RESET and weaker(situation.pause, PauseMode.RETRACT):
            return Pause(PauseMode.RETRACT)  # a token of the random bytes must never be made
        return Operate(operation)
    return None


def abort_step(situation: Situation) -> Action | None:
    """An engine that has released memory has no requests, and one of unknown weights is paused before anything else."""
    if situation.released or (situation.dirty and situation.pause is None):
        return None
    aborts = (operation for operation in _not_begun(situation) if operation.kind is OperationKind.ABORT)
    return next((Operate(operation) for operation in aborts), None)


def _not_begun(situation: Situation) -> Iterator[Operation]:
    begun = {record.operation.id for record in situation.operations}
    for operation in situation.desired.operations:
        if operation.id not in begun and operation.start_id in ("", situation.facts.start_id):
            yield operation


def _look(record: OperationRecord, situation: Situation) -> Action | None:
    operation = record.operation
    if operation not in situation.desired.operations:
        return LookAfter(operation, "it is no longer asked for")
    if situation.now >= record.began_at + operation.timeout_seconds:
        return LookAfter(operation, _too_late(operation, situation))
    return LookAfter(operation) if situation.now >= situation.operation_look_at else None


def _too_late(operation: Operation, situation: Situation) -> str:
    within = f"within {operation.timeout_seconds:g} s"
    if operation.kind is OperationKind.PROFILE:
        return f"the engine did not make {operation.steps} steps {within}: is there traffic?"
    return f"the engine was not free for it {within}: {_how_to_free(situation)}"


def _how_to_free(situation: Situation) -> str:
    """What lets SGLang flush: nothing runs, and nothing is queued, unless a retracting pause holds the queue."""
    if situation.pause is None:
        return "pause the fleet (execution.state Paused, pauseMode Retract), or end what runs (abortRequests)"
    if situation.pause is PauseMode.IN_PLACE:
        return "frozen requests keep their cache: set execution.pauseMode Retract"
    if not situation.facts.release.flushes_queued:
        return f"SGLang {situation.facts.release} cannot flush while requests are queued: end them (abortRequests)"
    return "requests that a pause does not hold keep it (their grammar is being compiled): end them (abortRequests)"


def _releasing(situation: Situation) -> bool:
    return bool(situation.desired.memory and situation.desired.memory.released)


def going_on(records: Iterable[OperationRecord]) -> list[OperationRecord]:
    return [r for r in records if r.operation.kind in LASTING and r.report.result is OperationResult.RUNNING]


def still_asked(records: Iterable[OperationRecord], listed: Iterable[Operation]) -> list[OperationRecord]:
    """The records to keep: of what is listed, and of what has yet to be stopped. One that is not listed now may be
    listed again, and must not be done twice: it is kept until another of its kind is."""
    ids = {operation.id for operation in listed}
    kinds = {_request(operation) for operation in listed}
    return [
        record
        for record in records
        if record.operation.id in ids
        or _request(record.operation) not in kinds
        or record.report.result is OperationResult.RUNNING
    ]


def _request(operation: Operation) -> str:
    """All checks are one kind of request: an id is used for one of them."""
    return "check" if operation.kind in CHECKS else operation.kind.value
