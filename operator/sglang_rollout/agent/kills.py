"""The end of the engine's process, asked of its launcher: without waiting for it, and again as long as somebody wants
it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from sglang_rollout.protocol.report import EngineState

from .engine_http import EngineError
from .engine_watch import EngineWatch

log = logging.getLogger(__name__)


class Kills:
    """under_way: the start that is being killed, empty when none is. on_begin, on_killed: told of a kill's beginning,
    and of the launcher's word that it does it."""

    def __init__(self, watch: EngineWatch, on_begin: Callable[[], None], on_killed: Callable[[], None]) -> None:
        self._watch = watch
        self._on_begin = on_begin
        self._on_killed = on_killed
        self.under_way = ""
        self._probe_failure: tuple[str, str] = ("", "")  # start, sentence
        self._tasks: set[asyncio.Task[None]] = set()

    def probe_failure(self, start: str) -> str:
        """Why the generation probe had this start killed; empty when it had not."""
        return self._probe_failure[1] if self._probe_failure[0] == start else ""

    def follow(self) -> None:
        """Forgets what is over, after each look at the engine."""
        facts = self._watch.facts
        if facts.state is EngineState.ABSENT or self.under_way != facts.start_id:
            self.under_way = ""

    def kill(self, reason: str, probe: bool = False, ordered: bool = False) -> None:
        """Tried once: whoever wants it asks again as long as the engine lives."""
        start = self._watch.record.start_id if self._watch.record else ""
        if not start or self.under_way == start or self._watch.facts.state is EngineState.ABSENT:
            return
        self.under_way = start
        if probe:
            self._probe_failure = (start, reason)
        self._on_begin()
        task = asyncio.create_task(self._kill(start, reason, ordered))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _kill(self, start: str, reason: str, ordered: bool) -> None:
        try:
            await self._watch.kill(start, reason, ordered)
        except EngineError as error:
            log.error("cannot kill the engine: %s", error)
            self.under_way = ""
            return  # asked again at the next look, which a failure must not hasten
        self._on_killed()
