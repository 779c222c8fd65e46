"""Any order of the operator under any schedule of faults: the agent or the engine killed before, within or after each
call and each write, loads that break, caches that stay busy, requests that never end. What must never happen, the
calls that kill an engine among it, is checked at every step by EngineRules; with the faults over, the last order must
hold."""

from __future__ import annotations

import asyncio
import base64
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sglang_rollout.agent import actions, memory_steps, plan, residency
from sglang_rollout.agent.actor import Actor
from sglang_rollout.agent.checkpoint import Checkpoint, CheckpointRefused, read_checkpoint
from sglang_rollout.agent.engine_http import EngineError, EngineUnreachable
from sglang_rollout.agent.fault_points import FaultPoints
from sglang_rollout.agent.hook import Hook
from sglang_rollout.agent.journal import JournalFile
from sglang_rollout.agent.live_transfer import LiveTransfer
from sglang_rollout.agent.move_report import move_report
from sglang_rollout.agent.move_steps import MoveSteps
from sglang_rollout.agent.settings import AgentSettings, StageSettings
from sglang_rollout.agent.sglang import Answer, CacheBusy, Load, ModelInfo, ServerInfo
from sglang_rollout.agent.sglang_versions import NEWEST, OLDEST, Release
from sglang_rollout.agent.situation import EngineFacts, Situation
from sglang_rollout.agent.stage_room import StageRoom
from sglang_rollout.agent.staging import Staging
from sglang_rollout.protocol.desired import AgentDesired, Execution, ExecutionState
from sglang_rollout.protocol.launch import EngineRecord, LaunchOrder
from sglang_rollout.protocol.memory import LaunchOptions, MemoryOrder, MemoryTag
from sglang_rollout.protocol.operations import Operation, OperationKind, OperationResult
from sglang_rollout.protocol.report import EngineState, MoveReport
from sglang_rollout.protocol.weights import KVCache, PauseMode, Step, WeightMove, WeightVersion
from sglang_rollout.transfer.hook_call import HookCall
from sglang_rollout.transfer.hook_report import HookReport

from . import checkpoints
from .fake_engine import LOST, RANDOM, EngineDied, EngineRules, name_in

T = TypeVar("T")


class AgentKilled(BaseException):
    """SIGKILL of the agent at this point."""


@dataclass
class Faults:
    """What happens at the n-th point from now on: "agent" and "engine" are killed there, "refused" is one failed call,
    "lost" a call whose answer never comes."""

    at: dict[int, str] = field(default_factory=dict)
    passed: int = 0

    def next(self) -> str:
        self.passed += 1
        return self.at.pop(self.passed, "")


class DirectEngine:
    """The driver's interface straight onto the rules, with a point for faults before and after each effect."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.spent: dict[str, float] = {}

    async def _point(self) -> None:
        fault = self._world.faults.next()
        if fault == "agent":
            raise AgentKilled
        if fault == "engine":
            self._world.kill_engine()
        if not self._world.rules.alive:
            raise EngineUnreachable("connection refused")
        if fault == "refused":
            raise EngineError("told to fail")
        if fault == "lost":
            raise EngineUnreachable("no answer")

    async def _before(self) -> EngineRules:
        await self._point()
        self._world.finish_load()
        return self._world.rules

    def _of_rules(self, rule: Callable[..., T], *arguments: Any) -> T:
        try:
            return rule(*arguments)
        except EngineDied as death:
            self._world.kill_engine()
            raise EngineUnreachable(str(death)) from death

    @property
    def release(self) -> Release:
        return self._world.release

    async def pause(self, mode: PauseMode) -> None:
        rules = await self._before()
        rules.pause("in_place" if mode is PauseMode.IN_PLACE else "retract")
        if mode is PauseMode.ABORT:
            rules.abort_all()
        await self._point()

    async def continue_generation(self) -> None:
        rules = await self._before()
        rules.resume()
        await self._point()

    async def flush_cache(self) -> None:
        rules = await self._before()
        flushed = rules.flush()
        await self._point()
        if not flushed:
            raise CacheBusy("busy")

    async def abort_all(self) -> None:
        (await self._before()).abort_all()

    async def sweep(self) -> None:
        await self.abort_all()

    async def load(self) -> Load:
        rules = await self._before()
        return Load(rules.load(), 0)

    async def fence(self) -> None:
        rules = await self._before()
        self._of_rules(rules.check, "checksum", True)

    async def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        rules = await self._before()
        self._of_rules(rules.release_memory, list(tags))
        await self._point()

    async def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        rules = await self._before()
        self._of_rules(rules.resume_memory, list(tags))
        await self._point()

    async def check_weights(self, action: str, seconds: float) -> Answer:
        rules = await self._before()
        success, message, checksum = self._of_rules(rules.check, action)
        await self._point()
        body = json.dumps({"success": success, "message": message, "per_engine_checksum": checksum})
        return Answer(200 if success else 400, body)

    async def start_profile(self, folder: str, steps: int, name: str) -> None:
        rules = await self._before()
        begun = rules.start_profile(Path(folder), name, steps)
        await self._point()
        if not begun:
            raise EngineError("in progress")

    async def stop_profile(self, seconds: float) -> bool:
        rules = await self._before()
        stopped = rules.stop_profile()
        await self._point()
        return stopped

    async def server_info(self) -> ServerInfo:
        await self._before()
        return ServerInfo(str(self.release), 300.0)

    async def load_from_disk(self, weights: WeightVersion, seconds: float) -> None:
        rules = await self._before()
        if why := self._of_rules(rules.begin_load, weights.path):
            raise EngineError(why)
        self._world.loading = weights
        await self._point()
        if not self._world.finish_load():
            raise EngineError("half of them")
        await self._point()

    async def begin_weight_update(self) -> None:
        rules = await self._before()
        if rules.begin_session():
            rules.end_session()
            rules.begin_session()
        await self._point()

    async def end_weight_update(self) -> None:
        rules = await self._before()
        problem = rules.end_session()
        await self._point()
        if problem:
            raise EngineError(problem)

    async def update_weights_from_tensor(self, body: dict[str, Any], seconds: float) -> None:
        rules = await self._before()
        call = HookCall.from_name(name_in(base64.b64decode(body["serialized_named_tensors"][0])))
        self._world.hooked = (call, self._of_rules(rules.begin_hook, call))
        await self._point()
        self._world.finish_load()
        await self._point()

    async def set_weight_version(self, version: str) -> None:
        rules = await self._before()
        rules.label(version)
        await self._point()

    async def model_info(self) -> ModelInfo:
        rules = await self._before()
        return ModelInfo(rules.version, rules.path)


class FaultyJournal(JournalFile):
    def __init__(self, path: Path, faults: Faults) -> None:
        self._faults = faults
        super().__init__(path)

    def save(self) -> None:
        if self._now == self._written:
            return
        if self._faults.next() == "agent":
            raise AgentKilled
        super().save()
        if self._faults.next() == "agent":
            raise AgentKilled


class Reference:
    def __init__(self, refused: set[str]) -> None:
        self._refused = refused

    def check(self, record: EngineRecord, folder: Path) -> None:
        if str(folder) in self._refused:
            raise CheckpointRefused("told to be refused")

    def running(self, record: EngineRecord) -> Checkpoint:
        return read_checkpoint(Path(record.order.model_path))


class World:
    """One engine, one agent, and their operator. It is the agent's EngineWatch as well."""

    def __init__(self, folder: Path, boot: WeightVersion, release: Release, backup: bool, staged: int) -> None:
        self.release = release
        self.launch = LaunchOptions(memory_saver=True, weights_backup=backup)
        self.endless = False  # requests end only by an abort
        self.faults = Faults()
        self.now = 0.0
        self.starts = 0
        self.boot = boot
        self.refused: set[str] = set()
        self.loading: WeightVersion | None = None
        self.hooked: tuple[HookCall, HookReport] | None = None
        self.stage = StageSettings("Host" if staged else "None", max(staged, 1), 4096, folder / "stage")
        self.ranks = 1
        self._ended: list[Actor] = []
        self.violations: list[str] = []
        self.kept_before = False  # a move kept the cache: that it is stale was ordered
        self.engine = DirectEngine(self)
        self._folder = folder
        self._facts = EngineFacts()
        self.rules: EngineRules
        self.room = StageRoom(self.stage)
        self.room.reserve(read_checkpoint(Path(boot.path)))
        self.desired = AgentDesired(1, 1, boot, Execution())
        self.start_engine()
        self.actor = self.start_agent()

    # --- the engine ---

    def start_engine(self) -> None:
        self.starts += 1
        self.loading = self.hooked = None
        self.rules = EngineRules(
            self.boot.path,
            self.boot.version,
            release=self.release,
            backup=self.launch.weights_backup,
            stage=self.stage.folder if self.stage.medium != "None" else None,
        )

    def kill_engine(self) -> None:
        self.violations += self.rules.violations
        self.rules.violations = []
        self.rules.alive = False
        self.loading = self.hooked = None

    def finish_load(self) -> bool:
        """The scheduler goes on with a load whose caller is gone, before whatever is asked next."""
        hooked, self.hooked = self.hooked, None
        if hooked is not None:
            self.rules.say(self.rules.end_hook(*hooked))
        weights, self.loading = self.loading, None
        return weights is None or self.rules.end_load(weights.path, weights.version)

    # --- the agent's EngineWatch ---

    @property
    def start_id(self) -> str:
        return f"s{self.starts}"

    @property
    def record(self) -> EngineRecord:
        order = LaunchOrder(self.boot.path, self.boot.version, launch=self.launch)
        return EngineRecord(self.start_id, "", order, "d", "a", self.stage.medium != "None")

    def observe(self) -> EngineFacts:
        rules = self.rules
        state = EngineState.SERVING if rules.alive else EngineState.ABSENT
        held = WeightVersion(rules.version, rules.path) if rules.alive else WeightVersion("", "")
        ready = rules.alive and rules.ready
        self._facts = EngineFacts(self.start_id, state, held, ready, self.launch, self.release)
        return self._facts

    def assume(self, **read: Any) -> None:
        self._facts = replace(self._facts, **read)

    # --- the agent ---

    def start_agent(self) -> Actor:
        journal = FaultyJournal(self._folder / "journal.json", self.faults)
        settings = AgentSettings(rank=0, nodes=1, pod_uid="u", pod_ip="", profile_dir=self._folder / "profiles")
        if hasattr(self, "actor"):
            self._ended.append(self.actor)
        settings = replace(settings, stage=self.stage)
        faults = FaultPoints()
        reference: Any = Reference(self.refused)
        watch: Any = self
        nothing: Any = None
        staging = Staging(settings, self.room, nothing, faults)
        hook = Hook(nothing, self.stage.folder)
        moves = MoveSteps(watch, journal, reference, settings, staging, hook, LiveTransfer(""), faults)
        self.actor = Actor(watch, journal, moves, lambda: self.now, settings, faults)
        return self.actor

    async def order(self, desired: AgentDesired) -> None:
        """As Control.accept: on disk before it is answered; an operator without an answer asks again."""
        self.desired = desired
        while True:
            try:
                self.actor.remember(desired=desired)
                self.actor.save()
                return
            except AgentKilled:
                self.start_agent()

    async def settle(self, steps: int | None = None) -> MoveReport | None:
        """The agent's loop, started again whenever it is killed; so is the engine. Until it has nothing to do, or for
        so many actions."""
        left = 300 if steps is None else steps
        while left > 0:
            if not self.rules.alive:
                self.start_engine()
            while self._ended:
                await self._ended.pop().close()
            try:
                if self.actor.must_register(self.observe()):
                    await self.actor.register(self._facts)
                    left -= 1
                    continue
                situation = self.actor.situation(self.desired, self.observe())
                action = plan.next_action(situation)
                if isinstance(action, actions.Nothing) and situation.background:
                    await asyncio.sleep(0.001)
                    self.step()
                    continue
                if isinstance(action, actions.Kill):
                    self.kill_engine()
                elif isinstance(action, actions.Nothing):
                    self.actor.save()
                    if action.until is None:
                        return self.at_rest()
                    self.now = max(self.now + 0.01, action.until)
                else:
                    await self.actor.perform(action, situation)
            except AgentKilled:
                self.start_agent()
            self.step()
            self.now += 0.01
            left -= 1
        assert steps is not None, f"never at rest: {self.rules.calls[-12:]}"
        return None

    def step(self) -> None:
        """One of the engine's own: a token for everybody, and for one it is the last."""
        try:
            made = self.rules.token()
        except EngineDied:
            self.kill_engine()
            return
        if made and self.rules.running and not self.endless and self.rules.tokens % 3 == 0:
            self.rules.running -= 1

    def situation(self) -> Situation:
        return self.actor.situation(self.desired, self.observe())

    def at_rest(self) -> MoveReport | None:
        """Nothing is left to do: what the report says is so, and what was ordered has come about or is refused."""
        rules, situation, desired = self.rules, self.situation(), self.desired
        report = move_report(situation)
        void = bool(situation.void)  # also when the agent was killed before the call that would have made it so
        assert situation.released == rules.released
        assert void or not rules.held & {LOST, RANDOM}
        shut = void or bool(rules.released)
        assert not shut or rules.pause_mode is not None
        paused = rules.pause_mode is not None
        level = shut or desired.execution.state is ExecutionState.PAUSED
        self._check_memory_and_operations(situation)
        if report is None:
            assert paused == level
            return None
        assert desired.move is not None
        wanted = desired.move
        if report.dirty:
            assert paused
            return report
        assert void or not rules.mixed
        if report.error or report.aborted or wanted.until in (Step.PREPARE, Step.CONTINUE):
            assert paused == level
        at_target = not void and rules.version == wanted.weights.version
        if report.error or report.aborted:
            assert not at_target
            return report
        if MemoryTag.WEIGHTS in rules.released and not at_target:
            return report
        if rules.released and wanted.until is Step.CONTINUE and desired.execution.state is ExecutionState.RUNNING:
            assert report.reached >= Step.APPLY
            return report
        assert report.reached >= wanted.until or (wanted.until is Step.PAUSE and at_target)
        if wanted.until >= Step.APPLY:
            assert at_target
            assert wanted.kv_cache is KVCache.KEEP or not rules.stale or self.kept_before
        if Step.PAUSE <= wanted.until < Step.CONTINUE and report.reached is not Step.CONTINUE:
            assert paused
        return report

    def _check_memory_and_operations(self, situation: Situation) -> None:
        order = self.desired.memory
        waits = situation.dirty or situation.moving or (situation.live and situation.at_target)
        if order is not None and not residency.refusal(situation) and not waits:
            assert self.rules.released == set(order.released)
        results = {record.operation.id: record.report.result for record in situation.operations}
        if not waits and not self.rules.released and not (order and order.released):
            profiles = [o for o in self.desired.operations if o.kind is OperationKind.PROFILE]
            for operation in self.desired.operations:
                if operation not in profiles:
                    assert results[operation.id] is not OperationResult.RUNNING


ORDERS = st.one_of(
    st.tuples(
        st.just("move"),
        st.sampled_from(["1", "2", "3", "bad"]),
        st.sampled_from([step for step in Step if step]),
        st.sampled_from([*PauseMode]),
        st.sampled_from([*KVCache]),
    ),
    st.tuples(st.just("until"), st.sampled_from([step for step in Step if step])),
    st.tuples(st.just("abort")),
    st.tuples(st.just("execution"), st.sampled_from([*ExecutionState]), st.sampled_from([*PauseMode])),
    st.tuples(st.just("memory"), st.one_of(st.none(), st.sets(st.sampled_from([*MemoryTag])))),
    st.tuples(st.just("operations"), st.lists(st.sampled_from([*OperationKind]), max_size=3)),
    st.tuples(st.just("requests"), st.integers(1, 3), st.booleans()),
    st.tuples(st.just("busy"), st.integers(0, 2)),
    st.tuples(st.just("breaks"), st.integers(0, 3)),
    st.tuples(st.just("kill engine")),
    st.tuples(st.just("kill agent")),
)
FAULTS = st.dictionaries(st.integers(1, 30), st.sampled_from(["agent", "engine", "refused", "lost"]), max_size=4)


async def obey(
    world: World, order: tuple[Any, ...], number: int, versions: dict[str, WeightVersion], actions: int | None
) -> None:
    desired = replace(world.desired, generation=number)
    match order:
        case ("move", label, until, mode, cache):
            if (mode, cache) == (PauseMode.IN_PLACE, KVCache.FLUSH):
                cache = KVCache.KEEP
            world.kept_before |= cache is KVCache.KEEP
            wanted = WeightMove(f"m{number}", versions[label], until, mode, cache, timeout_seconds=3.0)
            await world.order(replace(desired, move=wanted))
        case ("until", step) if desired.move is not None:
            await world.order(replace(desired, move=replace(desired.move, until=max(step, desired.move.until))))
        case ("abort",) if desired.move is not None:
            await world.order(replace(desired, move=replace(desired.move, abort=True)))
        case ("execution", state, mode):
            await world.order(replace(desired, execution=Execution(state, mode)))
        case ("memory", tags):
            memory = None if tags is None else MemoryOrder(sorted(tags), drain_seconds=0.5)
            await world.order(replace(desired, memory=memory))
        case ("operations", kinds):
            listed = [Operation(f"o{number}.{n}", kind, 2, timeout_seconds=1.0) for n, kind in enumerate(kinds)]
            await world.order(replace(desired, operations=listed))
        case ("requests", count, endless) if not world.actor.must_register(world.observe()):  # else none is routed
            if world.rules.pause_mode is None:
                world.rules.running += count
            else:
                world.rules.at_the_door += count
            world.endless = endless
        case ("busy", count):
            # A request that comes under a pause waits at the door.
            world.rules.grammar_queue = count if world.rules.pause_mode is None else 0
        case ("breaks", count):
            world.rules.fails_to_load = count
        case ("kill engine",):
            world.kill_engine()
        case ("kill agent",):
            world.start_agent()
    await world.settle(actions)


Given = list[tuple[tuple[Any, ...], dict[int, str], int | None]]  # order, faults, actions until the next order


async def scenario(
    orders: Given,
    versions: dict[str, WeightVersion],
    release: Release = NEWEST,
    backup: bool = False,
    staged: int = 0,
) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        world = World(Path(folder), versions["1"], release, backup, staged)
        world.refused.add(versions["bad"].path)
        for number, (order, faults, actions) in enumerate(orders, start=2):
            world.faults.at, world.faults.passed = dict(faults), 0
            await obey(world, order, number, versions, actions)
        # The faults are over, and the operator restarts what says that it is dirty.
        world.faults.at = {}
        world.rules.grammar_queue = world.rules.fails_to_load = 0
        world.endless = False
        report = await world.settle()
        if report is not None and report.dirty:
            world.kill_engine()
        final = WeightMove("final", versions["2"], Step.CONTINUE)
        await world.order(AgentDesired(1, 99, versions["1"], Execution(), move=final, memory=MemoryOrder([])))
        report = await world.settle()
        assert report is not None
        assert (report.reached, report.error, report.dirty) == (Step.CONTINUE, "", False)
        assert world.rules.token()
        assert world.rules.served[-1] == "2"
        assert world.violations + world.rules.violations == []
        await world.actor.close()


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_steps, "EMPTY_AGAIN_SECONDS", 0.0)


@pytest.fixture(scope="module")
def offered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, WeightVersion]:
    folder = tmp_path_factory.mktemp("models")
    return {
        label: WeightVersion(label, str(checkpoints.write(folder / f"v{label}", fill=number)))
        for number, label in enumerate(("1", "2", "3", "bad"))
    }


PAUSED = ("execution", ExecutionState.PAUSED, PauseMode.ABORT)
TO_2 = ("move", "2", Step.CONTINUE, PauseMode.RETRACT, KVCache.FLUSH)


@pytest.mark.parametrize("fault", ["agent", "engine", "refused", "lost"])
@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
@pytest.mark.parametrize("staged", [0, 1])
def test_one_fault_at_each_point_of_a_move(
    offered: dict[str, WeightVersion], fault: str, mode: PauseMode, staged: int
) -> None:
    order = ("move", "2", Step.CONTINUE, mode, KVCache.KEEP if mode is PauseMode.IN_PLACE else KVCache.FLUSH)
    for point in range(1, 44 if staged else 28):
        asyncio.run(scenario([(order, {point: fault}, None)], offered, staged=staged))
        broken = [(("breaks", 1), {}, 0), (order, {point: fault}, 4), (("abort",), {}, None)]
        asyncio.run(scenario(broken, offered, staged=staged))


@settings(max_examples=250, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    orders=st.lists(st.tuples(ORDERS, FAULTS, st.one_of(st.none(), st.integers(0, 8))), max_size=8),
    release=st.sampled_from([OLDEST, NEWEST]),
    backup=st.booleans(),
    staged=st.integers(0, 2),
)
@example(
    orders=[(("breaks", 3), {}, 0), (TO_2, {}, None), (("kill agent",), {}, None), (("abort",), {}, None)],
    release=NEWEST,
    backup=False,
    staged=1,
)
@example(
    orders=[(("busy", 1), {}, 0), (TO_2, {3: "agent"}, None), (PAUSED, {}, None)],
    release=NEWEST,
    backup=False,
    staged=0,
)
@example(
    orders=[(TO_2, {12: "agent"}, 4), (("move", "3", Step.PREPARE, PauseMode.RETRACT, KVCache.FLUSH), {}, None)],
    release=NEWEST,
    backup=False,
    staged=1,
)
@example(
    orders=[
        (("breaks", 2), {}, 0),
        (("move", "2", Step.APPLY, PauseMode.ABORT, KVCache.FLUSH), {}, None),
        (("move", "1", Step.APPLY, PauseMode.ABORT, KVCache.FLUSH), {}, None),
    ],
    release=OLDEST,
    backup=False,
    staged=1,
)
def test_any_orders_under_any_faults(
    offered: dict[str, WeightVersion], orders: Given, release: Release, backup: bool, staged: int
) -> None:
    asyncio.run(scenario(orders, offered, release, backup, staged))
