"""Does the steps that the plan asks for, one at a time, and keeps what has come of them. It decides nothing; what an
apply may have left behind is written down before the engine hears of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from sglang_rollout.protocol.desired import AgentDesired
from sglang_rollout.protocol.report import StageReport
from sglang_rollout.protocol.weights import PauseMode, Step, WeightMove
from sglang_rollout.protocol.wire import MalformedMessage
from sglang_rollout.transfer.stage_index import StageUnusable

from . import actions
from .checkpoint import CheckpointRefused
from .engine_http import EngineError
from .engine_watch import EngineWatch
from .fault_points import FaultPoints
from .journal import Journal, JournalFile, OpenApply, PauseMark
from .live_exchange import TransferLost
from .memory_steps import MemorySteps
from .move_report import reached
from .move_steps import MoveSteps, Untouched
from .one_shot_steps import OneShotSteps
from .plan import MAX_APPLIES
from .preparations import RETRY_SECONDS, Preparations
from .settings import AgentSettings
from .sglang import CacheBusy
from .situation import EngineFacts, Progress, Situation, Way, in_force, may_abort
from .stall_words import stall_words

log = logging.getLogger(__name__)

BUSY_SECONDS = (0.25, 5.0)  # first and longest time that the old weights serve before a flush is tried again
# Of releases that count queued requests as users of the cache.
FLUSH_HINT = "; this SGLang cannot flush while requests are queued: set weights.pauseMode Abort or weights.kvCache Keep"


class Actor:
    """The state of one engine's pause, move, memory and operations, and the steps that change it. `tell` is called when
    what goes on in the background is to be looked at."""

    def __init__(
        self,
        watch: EngineWatch,
        journal: JournalFile,
        moves: MoveSteps,
        clock: Callable[[], float],
        settings: AgentSettings,
        faults: FaultPoints,
    ) -> None:
        self._watch = watch
        self._journal = journal
        self._moves = moves
        self._clock = clock
        self._rank = settings.rank
        self._drain_seconds = settings.drain_seconds
        self._faults = faults
        self._memory = MemorySteps(watch, journal, clock)
        self._one_shots = OneShotSteps(watch, journal, settings, clock)
        self._preparations = Preparations(watch, journal, moves, clock, settings.rank)
        self._continued_start = ""
        self._applying = False

    @property
    def journal(self) -> Journal:
        return self._journal.now

    @property
    def _progress(self) -> Progress | None:
        return self._preparations.progress

    def remember(self, **changes: object) -> None:
        """To be written by save(), at the latest before the next step that cannot be undone."""
        self._journal.remember(**changes)

    def save(self) -> None:
        self._journal.save()

    def when_saved(self, tell: Callable[[], None]) -> None:
        self._journal.when_saved(tell)

    def when_prepared(self, tell: Callable[[], None]) -> None:
        self._preparations.when_changed(tell)

    async def close(self) -> None:
        await self._preparations.close()

    def stage_report(self) -> StageReport:
        return self._moves.report()

    def must_register(self, facts: EngineFacts) -> bool:
        return self._moves.must_register(facts)

    async def register(self, facts: EngineFacts) -> None:
        await self._faults.at("register:before")
        await self._moves.register(facts)
        await self._faults.at("register:after")

    def warm(self, facts: EngineFacts) -> None:
        self._moves.warm(facts)

    def situation(self, desired: AgentDesired, facts: EngineFacts) -> Situation:
        """What the plan is made from; state of an engine start that is over is dropped here."""
        if facts.start_id:
            self._journal.forget_older_starts(facts.start_id)
        self._preparations.follow(desired, facts.start_id)
        situation = self._view(desired, facts)
        self._memory.follow(situation)
        self._one_shots.follow(situation)
        if self._progress is not None:
            if may_abort(situation):
                self._note(aborted=True)
            if reached(situation) is Step.CONTINUE:
                self._note(continued=True)
        self._preparations.end_unwanted(situation)
        return self._view(desired, facts)

    def _view(self, desired: AgentDesired, facts: EngineFacts) -> Situation:
        journal = self.journal
        mark, held, weights = journal.pause, journal.residency, journal.held
        continued = self._continued_start == facts.start_id != ""
        told = weights is not None and (weights.start_id, weights.weights.version) == (
            facts.start_id,
            facts.weights.version,
        )
        if weights is not None and told:
            facts = replace(facts, weights=weights.weights)
        return Situation(
            desired=desired,
            facts=facts,
            pause=in_force(facts, mark.mode if mark else None, continued),
            dirty=journal.open_apply is not None and journal.open_apply.start_id == facts.start_id,
            progress=self._progress,
            now=self._clock(),
            rank=self._rank,
            applying=self._applying,
            paused_since=mark.since if mark else 0.0,
            turned=mark is not None and mark.turned,
            released=frozenset([*held.released, *held.doing]) if held else frozenset(),
            unsure=held is not None and bool(held.doing),
            void=held.void if held else "",
            emptying=self._memory.emptying,
            operations=tuple(journal.operations),
            operation_look_at=self._one_shots.look_at,
            drain_seconds=self._drain_seconds,
            open_move=journal.open_apply.move_id if journal.open_apply else "",
            held_root=weights.root if weights is not None and told else "",
            held_checksum=weights.checksum if weights is not None and told else "",
            held_sharding=weights.sharding if weights is not None and told else "",
            ahead=self._preparations.ahead,
            background=self._preparations.busy,
        )

    async def perform(self, action: actions.Action, situation: Situation) -> bool:
        """True if the step is done; otherwise the state says what went wrong and when to try again."""
        self._faults.engine_pid = self._watch.record.pid if self._watch.record else 0
        step = type(action).__name__.lower()
        ahead = isinstance(action, actions.Prepare) and action.ahead
        await self._faults.at(f"{step}:before")
        try:
            await self._do(action, situation)
        except CheckpointRefused as refusal:
            log.warning("refused: %s", refusal)
            if ahead:
                self._preparations.note_ahead(error=str(refusal), refused=True)
            else:
                self._note(error=str(refusal), refused=True)
            return False
        except CacheBusy as error:
            self._postpone(error, situation)
            return False
        except TransferLost as error:  # before anything was touched, and there is nobody to wait for
            log.warning("%s: %s", step, error)
            self._note(error=f"{step}: {error}")
            return False
        except (EngineError, OSError, MalformedMessage, StageUnusable, TimeoutError) as error:
            problem = f"{step}: {error or type(error).__name__}"
            if ahead:
                log.warning("%s", problem)
                self._preparations.note_ahead(problem=problem, retry_at=self._clock() + RETRY_SECONDS)
            else:
                self._fail(problem, situation)
            return False
        await self._faults.at(f"{step}:after")
        return True

    async def _do(self, action: actions.Action, situation: Situation) -> None:
        match action:
            case actions.Prepare(move, ahead):
                await self._preparations.begin(move, ahead, situation)
            case actions.Pause(mode, turned):
                await self._pause(mode, turned, situation)
            case actions.Flush(force):
                await self._flush(force)
            case actions.Check(move):
                await self._check(move, situation)
            case actions.Apply(move):
                await self._apply(move, situation)
            case actions.Continue():
                await self._continue(situation)
            case actions.LookAtLoad():
                await self._memory.look(situation)
            case actions.Empty():
                await self._memory.empty(situation)
            case actions.Release():
                await self._memory.release(action, situation)
            case actions.Resume():
                await self._memory.resume(action, situation)
            case actions.Operate(operation):
                await self._one_shots.begin(operation, situation)
            case actions.LookAfter(operation, end):
                await self._one_shots.look_after(operation, end, situation)

    async def _pause(self, mode: PauseMode, turned: bool, situation: Situation) -> None:
        if situation.moving:
            self._note(began_at=self._began())
            if situation.pause is None:
                self._note(paused_at=self._clock())
        self._note(flushed=False)
        # Before the call: it may pause the engine and fail after that, and then it must be taken for paused.
        self._continued_start = ""
        self._watch.engine.spent.clear()
        await self._watch.engine.pause(mode)
        self.remember(pause=PauseMark(situation.facts.start_id, mode, self._clock(), turned))
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

    async def _check(self, move: WeightMove, situation: Situation) -> None:
        progress = self._progress
        assert progress is not None
        try:
            await self._moves.check(move, progress.way, progress.root, situation)
        except StageUnusable as error:
            self._note(prepared=False)
            raise EngineError(f"version {move.weights.version!r} is not staged any more: {error}") from error
        self._note(checked=True, problem="")

    async def _apply(self, move: WeightMove, situation: Situation) -> None:
        progress = self._progress
        assert progress is not None
        if situation.pause is PauseMode.IN_PLACE and progress.way is not Way.STAGE:
            await self._watch.engine.fence()
            # The order may have gone meanwhile. From here to the note of what is begun nothing comes between.
            if self._progress is None or self._progress.move_id != move.id or self._progress.given_up:
                raise EngineError(f"version {move.weights.version!r} is not wanted any more")
        before = self.journal.open_apply
        self._applying = True
        try:
            self.remember(open_apply=OpenApply(situation.facts.start_id, move.id, move.weights, progress.root))
            self.save()
            await self._faults.at("apply:begun")
            held = await self._moves.apply(move, progress.way, progress.root, situation)
        except EngineError as error:
            problem = f"version {move.weights.version!r}: {error}"
            if isinstance(error, Untouched):
                self.remember(open_apply=before)
            failures = MAX_APPLIES if isinstance(error, TransferLost) else progress.failures + 1
            # What has not begun is given up; what has is repeated, or reported as dirty.
            given_up = problem if self.journal.open_apply is None and failures >= MAX_APPLIES else ""
            self._note(failures=failures, prepared=False, checked=False, flushed=False, error=given_up)
            raise EngineError(problem) from error
        finally:
            self._applying = False
        residency = self.journal.residency
        self._watch.assume(weights=held.weights)
        self.remember(open_apply=None, held=held, residency=replace(residency, void="") if residency else None)
        self.save()
        self._note(problem="", failures=0)

    async def _continue(self, situation: Situation) -> None:
        self._memory.not_empty_any_more()
        await self._watch.engine.continue_generation()
        self._continued_start = situation.facts.start_id
        self.remember(pause=None)
        self._watch.assume(ready=True)
        progress = self._progress
        if progress is not None and progress.paused_at is not None and situation.at_target:
            stall = round(self._clock() - progress.paused_at, 4)
            self._note(stall_seconds=stall)
            log.info("paused for %s", stall_words(stall, self._watch.engine.spent))
        self._note(paused_at=None, flushed=False)

    def _postpone(self, error: CacheBusy, situation: Situation) -> None:
        """The old weights serve for a while, then the flush is tried again."""
        if self._progress is None:
            return
        first, longest = BUSY_SECONDS
        wait = min(longest, first * 2**self._progress.busy)
        self._note(busy=self._progress.busy + 1)
        hint = "" if situation.facts.release.flushes_queued else FLUSH_HINT
        self._fail(f"{error}{hint}", situation, wait)

    def _fail(self, problem: str, situation: Situation, wait: float = RETRY_SECONDS) -> None:
        log.warning("%s", problem)
        progress, move = self._progress, situation.move
        if progress is None or move is None:
            return
        now = self._clock()
        self._note(problem=problem, retry_at=now + wait)
        late = progress.began_at is not None and now - progress.began_at > move.timeout_seconds
        # What has begun to apply is not given up by the clock: `failures` bounds it.
        if late and situation.live and not situation.at_target and self.journal.open_apply is None:
            self._note(error=f"given up after {move.timeout_seconds:g} s: {problem}")

    def _began(self) -> float:
        begun = self._progress.began_at if self._progress else None
        return self._clock() if begun is None else begun

    def _note(self, **changes: object) -> None:
        self._preparations.note(**changes)
