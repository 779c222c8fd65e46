"""A profile of the engine: started, looked after until its traces are there, or stopped."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from sglang_rollout.protocol.operations import Operation, OperationReport, OperationResult

from .engine_watch import EngineWatch
from .settings import AgentSettings
from .situation import Situation

STOP_SECONDS = 60.0  # the engine writes its traces before it answers
_TRACES = ("*.trace.json.gz", "*.pickle")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


class ProfileSteps:
    def __init__(self, watch: EngineWatch, settings: AgentSettings) -> None:
        self._watch = watch
        self._settings = settings

    async def start(self, operation: Operation, situation: Situation) -> None:
        """Raises EngineError and OSError."""
        folder = self._folder(operation, situation)
        await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
        await self._watch.engine.start_profile(str(folder), operation.steps, _UNSAFE.sub("-", operation.id))

    async def look(self, operation: Operation, end: str, situation: Situation) -> OperationReport | None:
        """None while it goes on. Raises EngineError and OSError."""
        folder = self._folder(operation, situation)
        if end:
            await self._watch.engine.stop_profile(STOP_SECONDS)
        elif await asyncio.to_thread(_traces, folder):
            # The scheduler answers this only after it has written what it is writing.
            await self._watch.engine.server_info()
        count = await asyncio.to_thread(_traces, folder)
        if end:
            kept = f"; what it made until then: {self._where(folder, count)}" if count else ""
            return OperationReport(operation.id, OperationResult.ERROR, f"stopped: {end}{kept}")
        if not count:
            return None
        version = situation.facts.weights.version
        said = self._where(folder, count)
        return OperationReport(operation.id, OperationResult.PASSED, said, weight_version=version)

    def _folder(self, operation: Operation, situation: Situation) -> Path:
        return self._settings.profile_dir / f"{_UNSAFE.sub('-', operation.id)}-{situation.facts.start_id}"

    def _where(self, folder: Path, count: int) -> str:
        pod, namespace = self._settings.pod_name, self._settings.namespace
        others = ", and in the same folder of the engine's other pods" if self._settings.nodes > 1 else ""
        return (
            f"{count} traces in pod {pod}:{folder}{others}; "
            f"kubectl cp -n {namespace} -c agent {pod}:{folder} {folder.name}"
        )


def _traces(folder: Path) -> int:
    return sum(1 for pattern in _TRACES for _ in folder.glob(pattern))
