"""How the weights of a move get from where they are into the engine: which way, whether its ranks can take them, and
the calls that put them in. What an apply may have left behind is the caller's to keep."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from sglang_rollout.protocol.operations import OperationKind, OperationReport, OperationResult
from sglang_rollout.protocol.report import EngineState, StageReport
from sglang_rollout.protocol.weights import SourceKind, Verify, WeightMove, WeightVersion
from sglang_rollout.transfer.hook_call import Action

from . import weight_check
from .background import Prepared, Progressed
from .checkpoint import Checkpoint, CheckpointRefused
from .engine_http import EngineError
from .engine_watch import EngineWatch
from .fault_points import FaultPoints
from .hook import Hook, Ranks
from .journal import HeldWeights, JournalFile, Registration, StagedNote
from .live_transfer import LiveTransfer
from .reference import ReferenceFile
from .settings import AgentSettings
from .situation import EngineFacts, Situation, Way
from .staging import Staging

log = logging.getLogger(__name__)

REGISTER_SECONDS = 180.0  # maps and pins the stage: a second for 16 GB, and more on a busy machine
REGISTER_TRIES = 3
CHECK_SECONDS = 60.0
CHECKSUM_SECONDS = 300.0
NO_HOOK = "this engine was started without the weight loader"
LIVE_KINDS = (SourceKind.DIRECT, SourceKind.COLOCATED)


class Untouched(EngineError):
    """The apply failed before the first byte was written: the old weights are whole."""


class MoveSteps:
    def __init__(
        self,
        watch: EngineWatch,
        journal: JournalFile,
        reference: ReferenceFile,
        settings: AgentSettings,
        staging: Staging,
        hook: Hook,
        live: LiveTransfer,
        faults: FaultPoints,
    ) -> None:
        self._watch = watch
        self._journal = journal
        self._reference = reference
        self._settings = settings
        self._staging = staging
        self._hook = hook
        self._live = live
        self._faults = faults
        self._known: tuple[str, frozenset[str]] = ("", frozenset())  # start id; layouts that its ranks can take
        self._register_tries = 0

    # --- the stage and the engine's loader ---

    def must_register(self, facts: EngineFacts) -> bool:
        """The engine answers, and its loader has not seen the stage: now, since later it would wait for requests."""
        if facts.state is not EngineState.SERVING or self._settings.rank > 0 or self._staging.room.stage is None:
            return False
        done = self._journal.now.registration
        return self._has_hook and (done is None or done.start_id != facts.start_id)

    async def register(self, facts: EngineFacts) -> None:
        """Has the loader map the stage. What fails again and again is kept as why nothing is applied from the stage."""
        self._register_tries += 1
        problem = ""
        try:
            engine = self._watch.engine
            await engine.begin_weight_update()
            # Of this pod alone: who the others are is told by the operator, later.
            ranks = Ranks(self._watch.ranks)
            verdict = await self._hook.call(engine, Action.REGISTER, ranks, REGISTER_SECONDS)
            await engine.end_weight_update()
            if verdict.problem and (verdict.heard or self._settings.nodes == 1):
                problem = f"the engine's weight loader cannot use the stage: {verdict.problem}"
            if self._settings.nodes == 1:  # what ranks of other pods can take is not known
                self._known = (facts.start_id, verdict.layouts)
        except EngineError as error:
            log.warning("register the stage: %s", error)
            if self._register_tries < REGISTER_TRIES:
                return
            problem = f"the engine's weight loader did not answer: {error}"
        self._register_tries = 0
        if problem:
            log.error("%s", problem)
        self._journal.remember(registration=Registration(facts.start_id, problem))
        self._journal.save()

    def warm(self, facts: EngineFacts) -> None:
        """When the engine serves: until then it needs the processors itself."""
        desired = self._journal.now.desired
        if facts.state is EngineState.SERVING and desired is not None and desired.expects_trainer:
            self._staging.warm()

    @property
    def _has_hook(self) -> bool:
        return self._watch.record is not None and self._watch.record.hook

    def stage_problem(self) -> str:
        """Why weights do not go by way of the stage; empty when they do."""
        room = self._staging.room
        if room.stage is None:
            return room.problem
        if not self._has_hook:
            return NO_HOOK
        if self._settings.rank > 0:
            return ""
        done = self._journal.now.registration
        if done is None or done.start_id != (self._watch.record.start_id if self._watch.record else ""):
            return "the engine's weight loader does not have the stage yet"
        desired = self._journal.now.desired
        if not done.problem and self._settings.nodes > 1 and not (desired and desired.fellows):
            return "the agents of the engine's other pods are not known yet"
        return done.problem

    def report(self) -> StageReport:
        """What lasts, not what is still to come."""
        report = self._staging.room.report()
        done = self._journal.now.registration
        problem = report.problem or (done.problem if done else "")
        if not problem and self._watch.record is not None and not self._has_hook:
            problem = NO_HOOK
        return StageReport(report.held, problem)

    # --- before the pause ---

    def way_of(self, move: WeightMove) -> Way:
        """Raises CheckpointRefused when there is none."""
        if move.source.kind in LIVE_KINDS:
            return Way.LIVE
        problem = self.stage_problem()
        if not problem:
            return Way.STAGE
        if move.source.kind is not SourceKind.STAGED and move.weights.path:
            return Way.ENGINE
        raise CheckpointRefused(f"version {move.weights.version!r} must be staged and cannot be: {problem}")

    def found(self, move: WeightMove) -> str:
        """The root of what is staged already for the move; "" when nothing is."""
        journal = self._journal.now
        notes = list(journal.staged)
        if journal.held is not None and journal.held.root:
            notes.append(StagedNote(move.id, journal.held.weights, journal.held.root))
        return self._staging.found(move, notes)

    async def check_folder(self, move: WeightMove) -> None:
        """Whether the engine may load the checkpoint, by its headers. Raises CheckpointRefused, OSError,
        MalformedMessage."""
        record = self._watch.record
        assert record is not None
        async with asyncio.timeout(move.timeout_seconds):
            await asyncio.to_thread(self._reference.check, record, Path(move.weights.path))

    def work(
        self, move: WeightMove, way: Way, served: str, needed: list[str]
    ) -> Callable[[Progressed], Awaitable[Prepared]]:
        """What the background does for the move. served, needed: roots, see StageRoom.slot_to_write. Raises EngineError
        when no slot is free."""
        desired = self._journal.now.desired
        key = desired.peer_key if desired else ""
        if way is Way.LIVE:
            return lambda progress: self._prepare_live(move)
        slot = self._staging.room.slot_to_write(served, needed)
        if not slot:
            raise EngineError("every slot of the stage is needed by weights that are being applied")

        async def bring(progress: Progressed) -> Prepared:
            return await self._staging.bring(move, await self._running(), slot, key, progress)

        return bring

    async def _prepare_live(self, move: WeightMove) -> Prepared:
        running = await self._running()
        return Prepared(await self._live.prepare(move, running, self._watch.engine, self._watch.facts.start_id))

    async def _running(self) -> Checkpoint:
        record = self._watch.record
        assert record is not None
        return await asyncio.to_thread(self._reference.running, record)

    async def drop(self, move_id: str) -> None:
        """The move will not be made, or is over."""
        await self._live.drop(move_id)

    # --- under the pause ---

    async def check(self, move: WeightMove, way: Way, root: str, situation: Situation) -> None:
        """Whether what was prepared can be put in: nothing is touched. Raises CheckpointRefused when a rank cannot take
        it, EngineError when that is not known."""
        if way is Way.LIVE:
            await self._live.check(move)
            return
        start, layouts = self._known
        layout = await asyncio.to_thread(self._staging.room.layout, root)
        if start == situation.facts.start_id and layout in layouts:
            return  # and the slots are mapped: an apply can be refused for nothing but the root
        engine = self._watch.engine
        await engine.begin_weight_update()
        verdict = await self._hook.call(engine, Action.CHECK, self._ranks(), CHECK_SECONDS, root=root)
        await engine.end_weight_update()
        if verdict.problem and verdict.heard:
            raise CheckpointRefused(f"the engine cannot take what is staged: {verdict.problem}")
        if verdict.problem:
            raise EngineError(verdict.problem)
        self._known = (situation.facts.start_id, verdict.layouts)

    async def apply(self, move: WeightMove, way: Way, root: str, situation: Situation) -> HeldWeights:
        """Puts them in and labels them, and holds what the engine says of its label against it. Raises Untouched, else
        EngineError, after which any part of them may be in."""
        engine = self._watch.engine
        if way is Way.ENGINE:
            await engine.load_from_disk(move.weights, move.timeout_seconds)
        else:
            if way is Way.STAGE:
                await self._apply_staged(move, root, situation)
            else:
                await self._live.apply(move, engine)
            await self._faults.at("apply:written")
            await engine.set_weight_version(move.weights.version)
        await self._faults.at("apply:labelled")
        found = await self._checksum() if move.verify is Verify.CHECKSUM else OperationReport("")
        if way is Way.ENGINE:
            info = await engine.model_info()
            if WeightVersion(info.version, info.path) != move.weights:
                raise EngineError(f"the engine says that it holds {info.version!r} from {info.path}")
        # Read from the folder of a version that is known by another root: what it is called is all that is known of it.
        known = root if move.source.root in ("", root) else ""
        return HeldWeights(situation.facts.start_id, move.weights, known, found.checksum, found.sharding)

    async def _apply_staged(self, move: WeightMove, root: str, situation: Situation) -> None:
        engine = self._watch.engine
        try:
            await engine.begin_weight_update()
        except EngineError as error:
            raise Untouched(str(error)) from error
        verdict = await self._hook.call(
            engine,
            Action.APPLY,
            self._ranks(),
            move.timeout_seconds,
            version=move.weights.version,
            root=root,
            sums=move.verify is not Verify.NONE,
        )
        if verdict.problem and not verdict.written:
            with contextlib.suppress(EngineError):
                await engine.end_weight_update()
            raise Untouched(verdict.problem)
        if verdict.problem:
            raise EngineError(verdict.problem)
        await engine.end_weight_update()
        self._known = (situation.facts.start_id, verdict.layouts)

    async def _checksum(self) -> OperationReport:
        """SGLang's own, over every rank: the operator holds it against other engines'. Raises EngineError."""
        answer = await self._watch.engine.check_weights("checksum", CHECKSUM_SECONDS)
        report = weight_check.judge("verify", OperationKind.CHECKSUM, answer.status, answer.text, "")
        if report.result is not OperationResult.PASSED:
            raise EngineError(f"the checksum after the apply failed: {report.message}")
        log.info("checksum of the engine: %s (%s)", report.checksum, report.sharding)
        return report

    def _ranks(self) -> Ranks:
        desired = self._journal.now.desired
        fellows, key = (tuple(desired.fellows), desired.peer_key) if desired else ((), "")
        return Ranks(self._watch.ranks, fellows, key)
