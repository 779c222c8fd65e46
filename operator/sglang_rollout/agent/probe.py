"""Finds a wedged engine: one that answers HTTP but makes no token although it should. A generation with a deadline
judges it, and only if no token was made for anybody else meanwhile: a saturated engine is not wedged."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

from .engine_http import EngineError, EngineUnreachable
from .sglang import SGLang

log = logging.getLogger(__name__)

IDLE_SHARE = 0.25  # of the deadline: how long without tokens until a probe is sent
LEAST_LOOKS = 5  # that an agent must have made during a probe: one that was itself starved judges nobody


@dataclass
class WedgeWatch:
    """What was seen of the engine's progress; all times are the monotonic clock's. Pure but for its fields."""

    counter: float | None = None
    progress_at: float | None = None
    probe_at: float | None = None
    looks: int = 0

    def rest(self) -> None:
        """The engine is not meant to run: nothing of before counts."""
        self.counter = self.progress_at = self.probe_at = None
        self.looks = 0

    def look(self, counter: float | None, now: float) -> None:
        """`counter`: SGLang.progress(), None when it could not be read."""
        if self.progress_at is None or (counter is not None and counter != self.counter):
            self.progressed(now)
        if counter is not None:
            self.counter = counter
        self.looks += 1

    def progressed(self, now: float) -> None:
        self.progress_at = now
        self.probe_at = None

    def sent(self, now: float) -> None:
        self.probe_at = now
        self.looks = 0

    def due(self, now: float, deadline: float) -> bool:
        return (
            self.probe_at is None and self.progress_at is not None and now - self.progress_at >= deadline * IDLE_SHARE
        )

    def wedged(self, now: float, deadline: float) -> bool:
        return self.probe_at is not None and now - self.probe_at >= deadline and self.looks >= LEAST_LOOKS


class GenerationProbe:
    """Watches one engine while `target` gives it, with the deadline in seconds; None while it is not to be judged."""

    def __init__(
        self,
        target: Callable[[], tuple[SGLang, float] | None],
        on_wedged: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._target = target
        self._on_wedged = on_wedged
        self._clock = clock
        self._seen = WedgeWatch()
        self._probe: asyncio.Task[None] | None = None

    def rest(self) -> None:
        """Before a pause: a probe held by it would wait like any request."""
        self._seen.rest()
        if self._probe is not None:
            self._probe.cancel()
            self._probe = None

    async def run(self) -> None:
        while True:
            target = self._target()
            if target is None:
                self.rest()
                await asyncio.sleep(0.5)
                continue
            engine, deadline = target
            await self._look(engine, deadline)
            await asyncio.sleep(min(5.0, max(0.02, deadline / 12)))

    async def _look(self, engine: SGLang, deadline: float) -> None:
        counter = None
        with contextlib.suppress(EngineError):  # a silent /metrics is no progress
            counter = await engine.progress()
        if self._target() is None:
            return
        now = self._clock()
        self._seen.look(counter, now)
        if self._seen.wedged(now, deadline):
            self.rest()
            self._on_wedged(f"a generation of one token did not end within {deadline:g} s and no other token was made")
        elif self._seen.due(now, deadline):
            if self._probe is not None:
                self._probe.cancel()
            self._seen.sent(now)
            self._probe = asyncio.create_task(self._generate(engine, deadline))

    async def _generate(self, engine: SGLang, deadline: float) -> None:
        try:
            await engine.generate_one(deadline * 2)
        except EngineUnreachable as error:
            log.warning("generation probe: %s", error)
            return
        except EngineError as error:
            log.info("generation probe: the engine answers, but %s", error)
        self._seen.progressed(self._clock())
