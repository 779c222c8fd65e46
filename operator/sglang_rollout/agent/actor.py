"""Does the steps that the plan asks for, one at a time, and keeps what has come of them. It decides nothing; what an
apply may have left behind is on disk before the engine hears of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from sglang_rollout.protocol.desired import AgentDesired
from sglang_rollout.protocol.weights import PauseMode, Step, WeightMove, WeightVersion
from sglang_rollout.protocol.wire import MalformedMessage

from . import plan
from .checkpoint import CheckpointRefused
from .engine_watch import EngineWatch
from .memory import Memory, MemoryFile, OpenApply, PauseMark
from .reference import ReferenceFile
from .sglang import CacheBusy, EngineError

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.5
BUSY_SECONDS = (0.25, 5.0)  # first and longest time that the old weights serve before a flush is tried again


class Actor:
    """The state of one engine's move and pause, and the steps that change it."""

    def __init__(
        self, watch: EngineWatch, memory: MemoryFile, reference: ReferenceFile, clock: Callable[[], float], rank: int
    ) -> None:
        self._watch = watch
        self._file = memory
        self._memory = memory.memory
        self._reference = reference
        self._clock = clock
        self._rank = rank
        self._progress: plan.Progress | None = None
        self._continued_start = ""

    @property
    def memory(self) -> Memory:
        return self._memory

    def remember(self, **changes: object) -> None:
        """To be written by save(), at the latest before the next apply."""
        self._memory = replace(self._memory, **changes)  # type: ignore[arg-type]

    def save(self) -> None:
        self._file.write(self._memory)

    def situation(self, desired: AgentDesired, facts: plan.EngineFacts) -> plan.Situation:
        """What the plan is made from; state of an engine start that is over is dropped here."""
        self._drop_what_is_over(desired, facts)
        situation = self._view(desired, facts)
        if self._progress is not None:
            if plan.may_abort(situation):
                self._note(aborted=True)
            if plan.reached(situation) is Step.CONTINUE:
                self._note(continued=True)
        return self._view(desired, facts)

    def _view(self, desired: AgentDesired, facts: plan.EngineFacts) -> plan.Situation:
        mark = self._memory.pause
        open_apply = self._memory.open_apply
        return plan.Situation(
            desired=desired,
            facts=facts,
            pause=plan.in_force(facts, mark.mode if mark else None, self._continued_start == facts.start_id != ""),
            dirty=open_apply is not None and open_apply.start_id == facts.start_id,
            progress=self._progress,
            now=self._clock(),
            rank=self._rank,
        )

    def _drop_what_is_over(self, desired: AgentDesired, facts: plan.EngineFacts) -> None:
        present = facts.start_id
        if present and (self._memory.open_apply is not None and self._memory.open_apply.start_id != present):
            self.remember(open_apply=None)
        if present and (self._memory.pause is not None and self._memory.pause.start_id != present):
            self.remember(pause=None)
        move = desired.move
        if move is None:
            self._progress = None
        elif self._progress is None or (self._progress.move_id, self._progress.start_id) != (move.id, present):
            self._progress = plan.Progress(move.id, present)

    async def perform(self, action: plan.Action, situation: plan.Situation) -> bool:
        """True if the step is done; otherwise the state says what went wrong and when to try again."""
        try:
            match action:
                case plan.Prepare(move):
                    await self._prepare(move)
                case plan.Pause(mode):
                    await self._pause(mode, situation)
                case plan.Flush(force):
                    await self._flush(force)
                case plan.Apply(move):
                    await self._apply(move, situation)
                case plan.Continue():
                    await self._continue(situation)
        except CheckpointRefused as refusal:
            log.warning("refused: %s", refusal)
            self._note(error=str(refusal), refused=True)
            return False
        except CacheBusy as error:
            self._postpone(error, situation)
            return False
        except (EngineError, OSError, MalformedMessage, TimeoutError) as error:
            self._fail(f"{type(action).__name__.lower()}: {error or type(error).__name__}", situation)
            return False
        return True

    async def _prepare(self, move: WeightMove) -> None:
        began = self._clock()
        self._note(began_at=self._began())
        record = self._watch.record
        assert record is not None
        check = asyncio.to_thread(self._reference.check, record, Path(move.weights.path))
        await asyncio.wait_for(check, move.timeout_seconds)
        self._note(prepared=True, problem="", began_at=None, prepare_seconds=round(self._clock() - began, 4))

    async def _pause(self, mode: PauseMode, situation: plan.Situation) -> None:
        start = situation.facts.start_id
        if plan.moving(situation):
            self._note(began_at=self._began())
            if situation.pause is None:
                self._note(paused_at=self._clock())
        self._note(flushed=False)
        await self._watch.engine.pause(mode)
        self._continued_start = ""
        self.remember(pause=PauseMark(start, mode))
        self._watch.assume(ready=False)
        self._note(problem="")

    async def _flush(self, force: bool) -> None:
        engine = self._watch.engine
        self._note(began_at=self._began())  # it may have been paused long before the move
        try:
            await engine.flush_cache()
        except CacheBusy:
            if not force:
                raise
            await engine.abort_all()
            await asyncio.sleep(0.2)
            await engine.flush_cache()
        self._note(flushed=True, problem="")

    async def _apply(self, move: WeightMove, situation: plan.Situation) -> None:
        engine = self._watch.engine
        if situation.pause is PauseMode.IN_PLACE:
            await engine.fence()
        self.remember(open_apply=OpenApply(situation.facts.start_id, move.id, move.weights))
        self.save()
        try:
            await engine.load_from_disk(move.weights, move.timeout_seconds)
            info = await engine.model_info()
            held = WeightVersion(info.version, info.path)
            if held != move.weights:
                raise EngineError(f"the engine says that it holds {held.version!r} from {held.path}")
        except EngineError as error:
            assert self._progress is not None
            self._note(failures=self._progress.failures + 1, prepared=False, flushed=False)
            raise EngineError(f"version {move.weights.version!r}: {error}") from error
        self.remember(open_apply=None)
        self.save()
        self._watch.assume(weights=held)
        self._note(problem="", failures=0)

    async def _continue(self, situation: plan.Situation) -> None:
        await self._watch.engine.continue_generation()
        self._continued_start = situation.facts.start_id
        self.remember(pause=None)
        self._watch.assume(ready=True)
        progress = self._progress
        if progress is not None and progress.paused_at is not None and situation.at_target:
            self._note(stall_seconds=round(self._clock() - progress.paused_at, 4))
        self._note(paused_at=None, flushed=False)

    def _postpone(self, error: CacheBusy, situation: plan.Situation) -> None:
        """The old weights serve for a while, then the flush is tried again."""
        if self._progress is None:
            return
        first, longest = BUSY_SECONDS
        wait = min(longest, first * 2**self._progress.busy)
        self._note(busy=self._progress.busy + 1)
        self._fail(str(error), situation, wait)

    def _fail(self, problem: str, situation: plan.Situation, wait: float = RETRY_SECONDS) -> None:
        log.warning("%s", problem)
        progress, move = self._progress, situation.move
        if progress is None or move is None:
            return
        now = self._clock()
        self._note(problem=problem, retry_at=now + wait)
        late = progress.began_at is not None and now - progress.began_at > move.timeout_seconds
        # What has begun to apply is not given up by the clock: `failures` bounds it.
        if late and situation.live and not situation.at_target and self._memory.open_apply is None:
            self._note(error=f"given up after {move.timeout_seconds:g} s: {problem}")

    def _began(self) -> float:
        begun = self._progress.began_at if self._progress else None
        return self._clock() if begun is None else begun

    def _note(self, **changes: object) -> None:
        if self._progress is not None:
            self._progress = replace(self._progress, **changes)  # type: ignore[arg-type]
