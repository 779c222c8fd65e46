"""How many requests the engine has: looked at now and then, and often while it drains."""

from __future__ import annotations

import logging
from collections.abc import Callable

from .draining import Draining
from .engine_http import EngineError
from .engine_watch import EngineWatch
from .sglang import Load

log = logging.getLogger(__name__)

LOAD_SECONDS = 10.0  # between reads of the request counts, which would otherwise wake the operator for ever


class LoadWatch:
    def __init__(self, watch: EngineWatch, drain_seconds: float, clock: Callable[[], float]) -> None:
        self._watch = watch
        self._drain_seconds = drain_seconds
        self._clock = clock
        self._drain = Draining(drain_seconds)
        self._looked_at = -LOAD_SECONDS
        self.load = Load(0, 0)

    def begin_drain(self) -> None:
        self._drain.begin(self._clock())

    def has_drained(self) -> bool:
        return self._drain.done(self._clock())

    def nothing_serves(self) -> None:
        self.load = Load(0, 0)

    async def look(self, draining: bool, held: bool, may_abort: bool) -> None:
        """held: a pause holds the requests. may_abort: what has not ended in time is ended."""
        now = self._clock()
        if not draining:
            self._drain = Draining(self._drain_seconds)
            if now - self._looked_at < LOAD_SECONDS:
                return
        self._looked_at = now
        try:
            self.load = await self._watch.engine.load()
            if draining and self._drain.look(self.load, held, now) and may_abort:
                await self._watch.engine.abort_all()
        except EngineError as error:
            log.warning("%s", error)
