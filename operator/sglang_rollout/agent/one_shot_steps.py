"""The steps of one-shot operations: checks and aborts, which are over with the engine's answer, and profiles and
flushes, which are looked after until they are. That one was begun is written down before the engine hears of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from sglang_rollout.protocol.memory import MemoryTag
from sglang_rollout.protocol.operations import Operation, OperationKind, OperationReport, OperationResult

from . import one_shots, weight_check
from .engine_http import EngineError
from .engine_watch import EngineWatch
from .journal import JournalFile, OperationRecord, Residency
from .profile_steps import ProfileSteps
from .settings import AgentSettings
from .sglang import CacheBusy
from .situation import Situation

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5


class OneShotSteps:
    """look_at: when to look again after what goes on; the monotonic clock's."""

    def __init__(
        self, watch: EngineWatch, journal: JournalFile, settings: AgentSettings, clock: Callable[[], float]
    ) -> None:
        self._watch = watch
        self._journal = journal
        self._clock = clock
        self._profile = ProfileSteps(watch, settings)
        self.look_at = 0.0
        self._give_up_interrupted()

    def _give_up_interrupted(self) -> None:
        """What was running when the agent ended, and cannot be looked at now, is not repeated: a comparison uses up its
        snapshot, an abort would end requests that came later."""
        self._journal.remember(
            operations=[
                record
                if record.operation.kind in one_shots.LASTING or record.report.result is not OperationResult.RUNNING
                else replace(record, report=_error(record.operation, one_shots.INTERRUPTED))
                for record in self._journal.now.operations
            ]
        )

    def follow(self, situation: Situation) -> None:
        """Forgets what will not be asked for again."""
        kept = one_shots.still_asked(self._journal.now.operations, situation.desired.operations)
        self._journal.remember(operations=kept)

    async def begin(self, operation: Operation, situation: Situation) -> None:
        self._journal.remember(
            operations=[
                *self._journal.now.operations,
                OperationRecord(situation.facts.start_id, operation, OperationReport(operation.id), self._clock()),
            ]
        )
        if operation.kind is OperationKind.RESET:
            held = self._journal.now.residency or Residency(situation.facts.start_id)
            self._journal.remember(residency=replace(held, void=f"reset:{operation.id}"))
        self._journal.save()
        try:
            report = await self._do(operation, situation)
        except (EngineError, OSError) as error:
            report = _error(operation, str(error))
        self._conclude(report)

    async def _do(self, operation: Operation, situation: Situation) -> OperationReport | None:
        """None if it goes on. Raises EngineError and OSError."""
        engine = self._watch.engine
        match operation.kind:
            case OperationKind.PROFILE:
                await self._profile.start(operation, situation)
                return None
            case OperationKind.FLUSH:
                return await self._flush(operation, "", situation)
            case OperationKind.ABORT:
                await engine.sweep()
                return OperationReport(operation.id, OperationResult.PASSED)
        version = "" if situation.void else situation.facts.weights.version
        answer = await engine.check_weights(weight_check.ACTIONS[operation.kind], operation.timeout_seconds)
        return weight_check.judge(operation.id, operation.kind, answer.status, answer.text, version)

    async def _flush(self, operation: Operation, end: str, situation: Situation) -> OperationReport | None:
        if MemoryTag.KV_CACHE not in situation.released:  # else there is nothing to flush
            try:
                await self._watch.engine.flush_cache()
            except CacheBusy:
                return _error(operation, end) if end else None
        return OperationReport(operation.id, OperationResult.PASSED)

    async def look_after(self, operation: Operation, end: str, situation: Situation) -> None:
        look = self._flush if operation.kind is OperationKind.FLUSH else self._profile.look
        try:
            report = await look(operation, end, situation)
        except (EngineError, OSError) as error:
            log.warning("%s: %s", operation.id, error)
            report = _error(operation, f"{end}; {error}") if end else None
        self._conclude(report)

    def _conclude(self, report: OperationReport | None) -> None:
        """None: it goes on."""
        if report is None:
            self.look_at = self._clock() + LOOK_SECONDS
            return
        log.info("%s: %s %s", report.id, report.result, report.message)
        self._journal.remember(
            operations=[
                replace(record, report=report) if record.operation.id == report.id else record
                for record in self._journal.now.operations
            ]
        )
        self._journal.save()


def _error(operation: Operation, message: str) -> OperationReport:
    return OperationReport(operation.id, OperationResult.ERROR, message)
