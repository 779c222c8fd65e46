"""The steps of one-shot operations: weight checks, which are over with their answer, and profiles, which are looked
after until their traces are there. That one was begun is on disk before the engine hears of it."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from sglang_rollout.protocol.operations import Operation, OperationKind, OperationReport, OperationResult

from . import one_shots, weight_check
from .engine_watch import EngineWatch
from .journal import JournalFile, OperationRecord, Residency
from .settings import AgentSettings
from .sglang import EngineError
from .situation import Situation

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
STOP_SECONDS = 60.0  # the engine writes its traces before it answers
_TRACES = ("*.trace.json.gz", "*.pickle")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


class OneShotSteps:
    def __init__(
        self, watch: EngineWatch, journal: JournalFile, settings: AgentSettings, clock: Callable[[], float]
    ) -> None:
        self._watch = watch
        self._journal = journal
        self._settings = settings
        self._clock = clock
        self.profile_look_at = 0.0
        self._give_up_interrupted()

    def _give_up_interrupted(self) -> None:
        """A check that was running when the agent ended is not repeated: a comparison uses up its snapshot."""
        self._journal.remember(
            operations=[
                record
                if record.operation.kind is OperationKind.PROFILE or record.report.result is not OperationResult.RUNNING
                else replace(record, report=_error(record.operation, one_shots.INTERRUPTED))
                for record in self._journal.now.operations
            ]
        )

    def follow(self, situation: Situation) -> None:
        """Forgets what is no longer asked for."""
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
        if operation.kind is OperationKind.PROFILE:
            await self._start_profile(operation, situation)
        else:
            self._conclude(await self._check(operation, situation))

    async def _check(self, operation: Operation, situation: Situation) -> OperationReport:
        version = "" if situation.void else situation.facts.weights.version
        action = weight_check.ACTIONS[operation.kind]
        try:
            answer = await self._watch.engine.check_weights(action, operation.timeout_seconds)
        except EngineError as error:
            return _error(operation, str(error))
        return weight_check.judge(operation.id, operation.kind, answer.status, answer.text, version)

    async def _start_profile(self, operation: Operation, situation: Situation) -> None:
        folder = self._folder(operation, situation)
        try:
            await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
            await self._watch.engine.start_profile(str(folder), operation.steps, _UNSAFE.sub("-", operation.id))
        except (EngineError, OSError) as error:
            self._conclude(_error(operation, str(error)))
        self.profile_look_at = self._clock() + LOOK_SECONDS

    async def look_at_profile(self, operation: Operation, end: str, situation: Situation) -> None:
        self.profile_look_at = self._clock() + LOOK_SECONDS
        folder = self._folder(operation, situation)
        if end:
            await self._watch.engine.stop_profile(STOP_SECONDS)
        elif await asyncio.to_thread(_traces, folder):
            # The scheduler answers this only after it has written what it is writing.
            await self._watch.engine.server_info()
        count = await asyncio.to_thread(_traces, folder)
        if end:
            kept = f"; what it made until then: {self._where(folder, count)}" if count else ""
            self._conclude(_error(operation, f"stopped: {end}{kept}"))
        elif count:
            version = situation.facts.weights.version
            said = self._where(folder, count)
            self._conclude(OperationReport(operation.id, OperationResult.PASSED, said, weight_version=version))

    def _folder(self, operation: Operation, situation: Situation) -> Path:
        return self._settings.profile_dir / f"{_UNSAFE.sub('-', operation.id)}-{situation.facts.start_id}"

    def _where(self, folder: Path, count: int) -> str:
        pod, namespace = self._settings.pod_name, self._settings.namespace
        others = ", and in the same folder of the engine's other pods" if self._settings.nodes > 1 else ""
        return (
            f"{count} traces in pod {pod}:{folder}{others}; "
            f"kubectl cp -n {namespace} -c agent {pod}:{folder} {folder.name}"
        )

    def _conclude(self, report: OperationReport) -> None:
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


def _traces(folder: Path) -> int:
    return sum(1 for pattern in _TRACES for _ in folder.glob(pattern))
