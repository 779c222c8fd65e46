"""How many requests an engine that drains still has. Nobody asks for that at other times."""

from __future__ import annotations

import logging
from collections.abc import Callable

from .draining import Draining
from .engine_http import EngineError
from .engine_watch import EngineWatch

log = logging.getLogger(__name__)


class DrainWatch:
    def __init__(self, watch: EngineWatch, drain_seconds: float, clock: Callable[[], float]) -> None:
        self._watch = watch
        self._drain_seconds = drain_seconds
        self._clock = clock
        self._drain = Draining(drain_seconds)

    def begin(self) -> None:
        self._drain.begin(self._clock())

    def forget(self) -> None:
        """It does not drain, or not any more."""
        self._drain = Draining(self._drain_seconds)

    def done(self) -> bool:
        return self._drain.done(self._clock())

    async def look(self, held: bool, may_abort: bool) -> None:
        """held: a pause holds the requests. may_abort: what has not ended in time is ended."""
        now = self._clock()
        try:
            if self._drain.look(await self._watch.engine.load(), held, now) and may_abort:
                await self._watch.engine.abort_all()
        except EngineError as error:
            log.warning("%s", error)
