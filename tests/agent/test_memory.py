"""Releasing and resuming memory, as the operator sees it: over HTTP, with an engine that any wrong call kills."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from sglang_rollout.agent import journal
from sglang_rollout.agent.sglang_versions import NEWEST, OLDEST, Release
from sglang_rollout.protocol import pod as paths
from sglang_rollout.protocol.desired import Execution, ExecutionState
from sglang_rollout.protocol.memory import LaunchOptions, MemoryOrder, MemoryTag
from sglang_rollout.protocol.report import AgentReport, EngineState
from sglang_rollout.protocol.weights import PauseMode, Step, WeightMove
from sglang_rollout.protocol.wire import loads

from .conftest import Versions
from .fake_pod import FakePod, MakePod, eventually

PAUSED = Execution(ExecutionState.PAUSED, PauseMode.RETRACT)
SAVER = LaunchOptions(memory_saver=True)
ALL = sorted(MemoryTag)
NONE = MemoryOrder([])


async def started(make_pod: MakePod, launch: LaunchOptions = SAVER, **rules: object) -> FakePod:
    pod = await make_pod()
    await pod.put(pod.desired(launch=launch))
    await pod.launch(**rules)
    await pod.serving()
    return pod


async def release(pod: FakePod, drain_seconds: float = 5.0, **desired: object) -> AgentReport:
    fields = {"execution": PAUSED, "memory": MemoryOrder(ALL, drain_seconds), **desired}
    await pod.put(pod.desired(**fields))
    return await pod.until(lambda r: r.engine.released == ALL and r.message != "step: Release")


async def resume(pod: FakePod, **desired: object) -> AgentReport:
    await pod.put(pod.desired(memory=NONE, **desired))
    return await pod.until(lambda r: not r.engine.released)


@pytest.mark.parametrize("row", [OLDEST, NEWEST], ids=str)
async def test_release_and_resume_in_the_only_safe_order(make_pod: MakePod, row: Release) -> None:
    pod = await started(make_pod, LaunchOptions(memory_saver=True, weights_backup=True), release=row)
    assert pod.engine is not None
    rules = pod.engine.rules
    report = await release(pod)
    assert report.engine.launch == LaunchOptions(memory_saver=True, weights_backup=True)
    assert (report.engine.paused, report.engine.weights_void) == (True, "")
    assert (await pod.call("GET", paths.PATH_READY))[0] == 503
    await resume(pod)
    await pod.until(lambda r: not r.engine.paused)
    assert rules.calls == [
        "pause retract",
        "flush",
        "release cudaGraph kvCache",
        "release weights",
        "resume weights",
        "resume kvCache",
        "resume cudaGraph",
        "continue",
    ]
    assert (await pod.call("GET", paths.PATH_READY))[0] == 200
    assert (await pod.generate(1))["versions"] == ["1"]
    assert not rules.violations


async def test_requests_end_by_themselves_before_a_release(make_pod: MakePod) -> None:
    pod = await started(make_pod)
    running = asyncio.create_task(pod.generate(150))
    assert pod.engine is not None
    rules = pod.engine.rules
    await eventually(lambda: rules.running > 0)
    await release(pod)
    assert len((await running)["versions"]) == 150
    assert "abort" not in rules.calls
    assert not rules.violations


async def test_requests_that_a_pause_holds_are_let_run_first(make_pod: MakePod) -> None:
    pod = await started(make_pod)
    running = asyncio.create_task(pod.generate(150))
    assert pod.engine is not None
    rules = pod.engine.rules
    await eventually(lambda: rules.running > 0)
    await pod.put(pod.desired(execution=PAUSED))
    await pod.until(lambda r: r.engine.paused)
    await release(pod)
    assert len((await running)["versions"]) == 150
    assert rules.calls[:4] == ["pause retract", "continue", "pause retract", "flush"]
    assert not rules.violations


@pytest.mark.parametrize("row", [OLDEST, NEWEST], ids=str)
async def test_what_takes_too_long_is_aborted(make_pod: MakePod, row: Release) -> None:
    pod = await started(make_pod, release=row)
    running = asyncio.create_task(pod.generate(100_000))
    assert pod.engine is not None
    rules = pod.engine.rules
    await eventually(lambda: rules.running > 0)
    report = await release(pod, drain_seconds=0.3)
    assert (await running)["meta_info"]["finish_reason"] == {"type": "abort"}
    assert report.engine.paused
    assert not rules.violations


async def test_weights_without_a_backup_are_void_until_they_are_moved_in_again(
    make_pod: MakePod, versions: Versions
) -> None:
    pod = await started(make_pod)
    assert pod.engine is not None
    report = await release(pod)
    assert (report.engine.weights_void, report.engine.weight_version) == ("released:1", "")
    report = await resume(pod)
    report = await pod.until(lambda r: "stays paused until a version is moved" in r.message)
    assert (report.engine.paused, report.engine.weights_void) == (True, "released:1")
    assert (await pod.call("GET", paths.PATH_READY))[0] == 503
    wanted = WeightMove("again", versions("1"), Step.CONTINUE)
    await pod.put(pod.desired(memory=NONE, move=wanted))
    report = await pod.until(lambda r: r.move is not None and r.move.reached is Step.CONTINUE)
    assert (report.engine.weight_version, report.engine.weights_void, report.engine.paused) == ("1", "", False)
    assert (await pod.generate(1))["versions"] == ["1"]
    await release(pod, move=wanted)
    assert (await pod.report()).engine.weights_void == "released:2"
    assert not pod.engine.rules.violations


async def test_weights_move_in_while_the_cache_stays_released(make_pod: MakePod, versions: Versions) -> None:
    """The order of a trainer on the same GPUs: weights back, update, then the cache."""
    pod = await started(make_pod)
    assert pod.engine is not None
    await release(pod)
    cache = MemoryOrder([MemoryTag.CUDA_GRAPH, MemoryTag.KV_CACHE])
    wanted = WeightMove("m", versions("2"), Step.CONTINUE)
    await pod.put(pod.desired(execution=PAUSED, memory=cache, move=wanted))
    report = await pod.until(lambda r: r.move is not None and r.move.reached is Step.CONTINUE)
    assert report.engine.released == sorted(cache.released)
    assert (report.engine.weight_version, report.engine.paused) == ("2", True)
    await pod.put(pod.desired(memory=NONE, move=wanted))
    await pod.until(lambda r: not r.engine.released and not r.engine.paused)
    assert (await pod.generate(1))["versions"] == ["2"]
    assert not pod.engine.rules.violations


async def test_a_move_under_way_comes_before_a_release(make_pod: MakePod, versions: Versions) -> None:
    pod = await started(make_pod, LaunchOptions(memory_saver=True, weights_backup=True))
    assert pod.engine is not None
    wanted = WeightMove("m", versions("2"), Step.PAUSE)
    await pod.put(pod.desired(move=wanted))
    await pod.until(lambda r: r.move is not None and r.move.reached is Step.PAUSE)
    order = MemoryOrder(ALL)
    await pod.put(pod.desired(execution=PAUSED, move=wanted, memory=order))
    await asyncio.sleep(0.2)
    assert (await pod.report()).engine.released == []
    onward = WeightMove("m", versions("2"), Step.CONTINUE)
    await pod.put(pod.desired(execution=PAUSED, move=onward, memory=order))
    report = await pod.until(lambda r: r.engine.released == ALL)
    assert report.engine.weight_version == "2"
    assert not pod.engine.rules.violations


async def test_an_engine_without_the_flag_is_left_as_it_is(make_pod: MakePod) -> None:
    pod = await started(make_pod, LaunchOptions())
    await pod.put(pod.desired(execution=PAUSED, memory=MemoryOrder(ALL)))
    report = await pod.until(lambda r: "without --enable-memory-saver" in r.message)
    assert (report.engine.released, report.engine.paused) == ([], True)


async def test_no_order_keeps_what_is_so(make_pod: MakePod) -> None:
    pod = await started(make_pod)
    assert pod.engine is not None
    await release(pod)
    await pod.put(pod.desired(generation=2, memory=None))
    await asyncio.sleep(0.2)
    report = await pod.report()
    assert (report.engine.released, report.engine.paused) == (ALL, True)
    assert "continue" not in pod.engine.rules.calls


async def test_what_is_released_is_known_to_the_next_agent(make_pod: MakePod) -> None:
    pod = await started(make_pod)
    assert pod.engine is not None
    await release(pod)
    await pod.stop_agent()
    await pod.start_agent()
    report = await pod.serving()
    assert report.engine.released == ALL
    await resume(pod)
    assert pod.engine is not None
    assert not pod.engine.rules.violations


async def test_an_unknown_outcome_ends_the_engine(make_pod: MakePod) -> None:
    """The agent was killed during the call: repeating it and undoing it may both kill the engine at a worse time."""
    pod = await started(make_pod)
    assert pod.engine is not None
    pod.engine.delays["/release_memory_occupation"] = 5.0
    await pod.put(pod.desired(execution=PAUSED, memory=MemoryOrder(ALL), launch=SAVER))
    await pod.until(lambda r: r.engine.released != [])
    await pod.stop_agent()
    kept = loads(journal.Journal, (pod.settings.state_dir / "journal.json").read_bytes())
    assert kept.residency is not None
    assert kept.residency.doing == [MemoryTag.CUDA_GRAPH, MemoryTag.KV_CACHE]
    await pod.start_agent()
    await eventually(lambda: pod.kills != [])
    await pod.until(lambda r: r.engine.state is EngineState.ABSENT)
    assert "what it holds is not known" in pod.kills[0]
    await pod.launch()
    report = await pod.until(lambda r: r.engine.released == ALL)
    assert pod.engine is not None
    assert not pod.engine.rules.violations
    assert report.engine.paused


async def test_nothing_is_generated_to_probe_a_released_engine(make_pod: MakePod) -> None:
    pod = await started(make_pod)
    assert pod.engine is not None
    await release(pod, execution=Execution(), probe_seconds=0.1)
    tokens = pod.engine.rules.tokens
    await asyncio.sleep(0.5)
    assert pod.engine.rules.tokens == tokens
    assert pod.kills == []
    assert not pod.engine.rules.violations


async def test_the_last_of_many_orders_holds(make_pod: MakePod, versions: Versions) -> None:
    """A spec that is flipped all the time: the last one wins, no engine dies, nothing is left half done."""
    pod = await started(make_pod)
    assert pod.engine is not None
    rules = pod.engine.rules
    running = [asyncio.create_task(pod.generate(300)) for _ in range(3)]
    modes = list(PauseMode)
    for n in range(60):
        execution = Execution([ExecutionState.RUNNING, ExecutionState.PAUSED][n % 2], modes[n % 3])
        memory = [None, MemoryOrder(ALL, 0.05), NONE, MemoryOrder([MemoryTag.KV_CACHE], 0.05)][n % 4]
        move = WeightMove(f"m{n // 7}", versions(str(1 + n // 7 % 3)), Step.CONTINUE)
        await pod.put(pod.desired(generation=n + 2, execution=execution, memory=memory, move=move))
        await asyncio.sleep(0.02)
    final = WeightMove("final", versions("2"), Step.CONTINUE)
    await pod.put(pod.desired(generation=99, memory=NONE, move=final))
    report = await pod.until(lambda r: r.move is not None and r.move.id == "final" and r.move.reached is Step.CONTINUE)
    assert (report.engine.released, report.engine.paused, report.engine.weight_version) == ([], False, "2")
    assert (await pod.generate(2))["versions"] == ["2", "2"]
    await asyncio.gather(*running)
    assert pod.kills == []
    assert not rules.violations


async def test_a_move_in_between_starts_the_time_for_requests_anew(make_pod: MakePod, versions: Versions) -> None:
    """What was seen of requests before a move says nothing of those after it."""
    pod = await started(make_pod, LaunchOptions(memory_saver=True, weights_backup=True))
    assert pod.engine is not None
    rules = pod.engine.rules
    running = [asyncio.create_task(pod.generate(400))]
    await eventually(lambda: rules.running > 0)
    order = MemoryOrder(ALL, drain_seconds=3.0)
    await pod.put(pod.desired(execution=PAUSED, memory=order))
    await pod.until(lambda r: "requests to end" in r.message)
    wanted = WeightMove("m", versions("2"), Step.PAUSE)
    await pod.put(pod.desired(execution=PAUSED, memory=order, move=wanted))
    await pod.until(lambda r: r.move is not None and r.move.reached is Step.PAUSE)
    await asyncio.sleep(3.2)
    await pod.put(pod.desired(execution=PAUSED, memory=order, move=replace(wanted, until=Step.CONTINUE)))
    await pod.until(lambda r: r.engine.released == ALL)
    assert len((await running[0])["versions"]) == 400
    assert "abort" not in rules.calls
    assert not rules.violations
