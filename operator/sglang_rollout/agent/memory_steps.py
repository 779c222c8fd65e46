"""The steps that empty an engine and release or resume its memory. What a call may have done is written down before
the engine hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from sglang_rollout.protocol.memory import MemoryTag

from . import residency
from .actions import Release, Resume
from .engine_http import EngineError, EngineUnheard
from .engine_watch import EngineWatch
from .journal import JournalFile, Residency
from .sglang import CacheBusy
from .situation import Emptying, Situation

MemoryCall = Callable[[tuple[MemoryTag, ...]], Awaitable[None]]

EMPTY_SECONDS = 10.0
EMPTY_AGAIN_SECONDS = 0.1


class MemorySteps:
    """emptying: kept by this process alone; one that starts again looks again."""

    def __init__(self, watch: EngineWatch, journal: JournalFile, clock: Callable[[], float]) -> None:
        self._watch = watch
        self._journal = journal
        self._clock = clock
        self.emptying: Emptying | None = None

    def follow(self, situation: Situation) -> None:
        """Forgets what belongs to another engine process, to an order that is no more, or to a time before a weight
        move that the release waits for."""
        order = situation.desired.memory
        wanted = frozenset(order.released) if order else frozenset()
        releases = bool(wanted - situation.released) and not residency.refusal(situation)
        other = self.emptying is not None and self.emptying.start_id != situation.facts.start_id
        if other or not (releases or situation.restart_ordered):
            self.emptying = None

    def not_empty_any_more(self) -> None:
        """The engine runs again: what was seen of it does not hold."""
        if self.emptying is not None:
            self.emptying = replace(self.emptying, emptied=False)

    async def look(self, situation: Situation) -> None:
        now = self._clock()
        # One that does not tell may have some: their time runs.
        began = self.emptying or Emptying(situation.facts.start_id, now, now, 1)
        self.emptying = replace(began, looked_at=now)
        load = await self._watch.engine.load()
        self.emptying = replace(began, looked_at=self._clock(), requests=load.requests, emptied=False)

    async def empty(self, situation: Situation) -> None:
        """The engine's own word counts, by a flush: its condition is that of a release, and counts of requests stand
        still under a pause."""
        engine, now = self._watch.engine, self._clock()
        began = self.emptying or Emptying(situation.facts.start_id, now, now, 0)
        try:
            async with asyncio.timeout(EMPTY_SECONDS):
                if began.requests:
                    await engine.sweep()
                while not await self._flushed():
                    await engine.abort_all()
                    await asyncio.sleep(EMPTY_AGAIN_SECONDS)
        except TimeoutError as error:
            raise EngineError(f"requests are left {EMPTY_SECONDS:g} s after all were aborted") from error
        self.emptying = replace(began, requests=0, emptied=True)

    async def _flushed(self) -> bool:
        try:
            await self._watch.engine.flush_cache()
        except CacheBusy:
            return False
        return True

    async def release(self, step: Release, situation: Situation) -> None:
        held = before = self._residency(situation)
        if MemoryTag.WEIGHTS in step.tags and not situation.facts.launch.weights_backup:
            releases = held.releases + 1
            held = replace(held, void=f"released:{releases}", releases=releases)
        after = replace(held, released=[*held.released, *step.tags])
        await self._call(self._watch.engine.release_memory, step.tags, before, held, after)

    async def resume(self, step: Resume, situation: Situation) -> None:
        held = self._residency(situation)
        after = replace(held, released=[tag for tag in held.released if tag not in step.tags])
        await self._call(self._watch.engine.resume_memory, step.tags, held, held, after)

    async def _call(
        self, call: MemoryCall, tags: tuple[MemoryTag, ...], before: Residency, during: Residency, after: Residency
    ) -> None:
        """An answer other than success leaves the tags in `doing`: the plan has the engine killed then."""
        self._journal.remember(residency=replace(during, doing=list(tags)))
        self._journal.save()
        try:
            await call(tags)
        except EngineUnheard:
            self._journal.remember(residency=before)
            raise
        self._journal.remember(residency=after)
        self._journal.save()

    def _residency(self, situation: Situation) -> Residency:
        return self._journal.now.residency or Residency(situation.facts.start_id)
