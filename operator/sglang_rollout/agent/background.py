"""One preparation at a time beside the agent's loop: how far it is, what came of it, and its end when nobody wants it
any more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from sglang_rollout.protocol.weights import Source, WeightVersion

from .checkpoint import CheckpointRefused
from .engine_http import EngineError

log = logging.getLogger(__name__)

TELL_SECONDS = 0.5  # between tellings of progress: each wakes the operator

Progressed = Callable[[int, int], None]


@dataclass(frozen=True)
class Prepared:
    """What is there now. root: digest of the manifest; empty for what is not staged. nonfinite: values that are Inf or
    NaN in it."""

    root: str = ""
    nonfinite: int = 0


@dataclass(frozen=True)
class Preparing:
    """A preparation that was begun for `order` on the engine `start_id`; it serves every order of the same weights.
    error: it failed; refused: as it would every time."""

    order: str
    weights: WeightVersion
    source: Source
    start_id: str
    began_at: float
    running: bool = True
    prepared: Prepared | None = None
    error: str = ""
    refused: bool = False
    passing: bool = False  # the error may be over in a moment
    seconds: float = 0.0
    done_bytes: int = 0
    of_bytes: int = 0


class NotPrepared(Exception):
    """It failed this time; the sentence says why."""


class Background:
    """`tell` is called when something is to be looked at again."""

    def __init__(self, clock: Callable[[], float], tell: Callable[[], None]) -> None:
        self._clock = clock
        self._tell = tell
        self._task: asyncio.Task[None] | None = None
        self._work: asyncio.Task[Prepared] | None = None
        self._told_to_end = False
        self._told_at = 0.0
        self.state: Preparing | None = None

    @property
    def running(self) -> bool:
        """Also one that was told to end and has not yet: what it writes to is not free."""
        return self._task is not None and not self._task.done()

    @property
    def ending(self) -> bool:
        return self.running and (self.state is None or not self.state.running)

    def begin(self, begun: Preparing, work: Callable[[Progressed], Awaitable[Prepared]], seconds: float) -> None:
        """Only when none is running. Raising from `work`: CheckpointRefused is for good, OSError may pass."""
        assert not self.running

        async def working() -> Prepared:
            return await work(self._progressed(begun))

        self.state = begun
        self._told_to_end = False
        loop = asyncio.get_running_loop()
        self._work = loop.create_task(working())
        self._task = loop.create_task(self._run(begun, self._work, seconds))

    def cancel(self) -> None:
        if self.running and not self._told_to_end:
            log.info("the preparation of %s is ended", self.state.order if self.state else "")
        self._end()
        self.state = None

    async def close(self) -> None:
        """No deadline: the stage must not be given up while a thread may still write to it, and no thread can be ended.
        Where storage hangs for good, the kubelet ends the process."""
        self.cancel()
        if self._task is not None:
            await asyncio.wait([self._task])

    def _end(self) -> None:
        """Once: a second cancellation would break off the first one's waiting for what still writes."""
        if self._work is not None and not self._told_to_end:
            self._told_to_end = True
            self._work.cancel()

    async def _run(self, begun: Preparing, work: asyncio.Task[Prepared], seconds: float) -> None:
        try:
            late = not (await asyncio.wait([work], timeout=seconds))[0]
            if late:
                self._end()
                self._note(begun, None, f"not prepared within {seconds:g} s", False, False)
                self._tell()
                await asyncio.gather(work, return_exceptions=True)  # it may be deaf for long: slow storage
            else:
                self._note(begun, *self._outcome(begun, work))
        finally:
            self._tell()

    def _outcome(self, begun: Preparing, work: asyncio.Task[Prepared]) -> tuple[Prepared | None, str, bool, bool]:
        """What was prepared, or the error, and whether it is for good or may pass."""
        try:
            return work.result(), "", False, False
        except CheckpointRefused as refusal:
            return None, str(refusal), True, False
        except (TimeoutError, asyncio.CancelledError) as end:
            return None, str(end) or "it was not prepared in time", False, False
        except OSError as problem:
            return None, str(problem), False, True
        except (NotPrepared, EngineError) as problem:
            log.warning("preparation of %s: %s", begun.order, problem)
            return None, str(problem), False, False
        except Exception as problem:
            log.exception("preparation of %s", begun.order)
            return None, str(problem) or type(problem).__name__, False, False

    def _note(self, begun: Preparing, prepared: Prepared | None, error: str, refused: bool, passing: bool) -> None:
        if self.state is not None and self.state.order == begun.order:
            took = round(self._clock() - begun.began_at, 4)
            self.state = replace(
                self.state,
                running=False,
                prepared=prepared,
                error=error,
                refused=refused,
                passing=passing,
                seconds=took,
            )

    def _progressed(self, begun: Preparing) -> Progressed:
        loop = asyncio.get_running_loop()

        def note(done: int, of: int) -> None:
            if self.state is None or self.state.order != begun.order:
                return
            self.state = replace(self.state, done_bytes=done, of_bytes=of)
            if self._clock() - self._told_at >= TELL_SECONDS:
                self._told_at = self._clock()
                self._tell()

        def progressed(done: int, of: int) -> None:
            loop.call_soon_threadsafe(note, done, of)

        return progressed
