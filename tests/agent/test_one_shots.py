"""One-shot operations as the operator sees them: done once for each engine process, and then only reported."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_rollout.agent import one_shot_steps
from sglang_rollout.agent.sglang_versions import NEWEST, OLDEST, Release
from sglang_rollout.protocol.desired import Execution, ExecutionState
from sglang_rollout.protocol.operations import Operation, OperationKind, OperationReport, OperationResult
from sglang_rollout.protocol.report import EngineState
from sglang_rollout.protocol.weights import PauseMode, Step, WeightMove

from .conftest import Versions
from .fake_pod import FakePod, eventually

SNAPSHOT = Operation("check:1", OperationKind.SNAPSHOT)
RESET = Operation("check:2", OperationKind.RESET)
COMPARE = Operation("check:3", OperationKind.COMPARE)
CHECKSUM = Operation("check:4", OperationKind.CHECKSUM)


@pytest.fixture(autouse=True)
def _quick_looks_at_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_shot_steps, "LOOK_SECONDS", 0.02)


async def done(pod: FakePod, operation: Operation, **desired: object) -> OperationReport:
    await pod.put(pod.desired(operations=[operation], **desired))
    report = await pod.until(
        lambda r: any(o.id == operation.id and o.result is not OperationResult.RUNNING for o in r.operations)
    )
    return next(o for o in report.operations if o.id == operation.id)


async def test_a_snapshot_equals_what_is_loaded_again(serving: FakePod, versions: Versions) -> None:
    assert serving.engine is not None
    assert (await done(serving, SNAPSHOT)).result is OperationResult.PASSED
    assert (await done(serving, RESET)).result is OperationResult.PASSED
    report = await serving.until(lambda r: r.engine.weights_void != "")
    assert (report.engine.weights_void, report.engine.weight_version) == ("reset:check:2", "")
    assert report.engine.paused
    differs = await done(serving, COMPARE)
    assert (differs.result, differs.differing, len(differs.tensors)) == (OperationResult.MISMATCH, 12, 10)
    again = WeightMove("again", versions("1"), Step.CONTINUE)
    report = await serving.put(serving.desired(move=again))
    report = await serving.until(lambda r: r.engine.weight_version == "1" and not r.engine.paused)
    equal = await done(serving, Operation("check:5", OperationKind.COMPARE), move=again)
    assert (equal.result, equal.weight_version) == (OperationResult.PASSED, "1")
    assert not serving.engine.rules.violations


async def test_an_operation_is_done_once(serving: FakePod) -> None:
    assert serving.engine is not None
    rules = serving.engine.rules
    first = await done(serving, CHECKSUM)
    assert first.checksum
    assert first.sharding == "role=target,tp_rank=0,tp_size=1"
    for generation in range(2, 5):
        await serving.put(serving.desired(generation=generation, operations=[CHECKSUM]))
        await asyncio.sleep(0.06)
    await serving.stop_agent()
    await serving.start_agent()
    assert (await serving.serving()).operations == [first]
    assert rules.calls.count("check checksum") == 1
    await serving.put(serving.desired(generation=5))
    await asyncio.sleep(0.06)
    assert (await serving.report()).operations == [first]
    await done(serving, SNAPSHOT)
    await serving.until(lambda r: [o.id for o in r.operations] == [SNAPSHOT.id])


async def test_what_is_not_asked_for_meanwhile_is_not_done_twice(serving: FakePod) -> None:
    """An order may be taken back before the operator hears that it was done, and be given again."""
    assert serving.engine is not None
    first = await done(serving, CHECKSUM)
    await serving.put(serving.desired())
    assert await done(serving, CHECKSUM) == first
    assert serving.engine.rules.calls.count("check checksum") == 1
    assert (await done(serving, SNAPSHOT)).result is OperationResult.PASSED
    assert (await serving.report()).operations != [first]
    await done(serving, CHECKSUM)
    assert serving.engine.rules.calls.count("check checksum") == 2, "the id is used for another request"


async def test_a_new_engine_process_is_checked_again(serving: FakePod) -> None:
    await done(serving, CHECKSUM)
    await serving.end_engine("SIGKILL")
    await serving.until(lambda r: r.engine.state is EngineState.ABSENT)
    engine = await serving.launch()
    await serving.serving()
    await serving.until(lambda r: [o.result for o in r.operations] == [OperationResult.PASSED])
    assert engine.rules.calls.count("check checksum") == 1


async def test_what_the_engine_cannot_do_is_not_an_error(serving: FakePod) -> None:
    assert serving.engine is not None
    serving.engine.rules.compares = False
    await done(serving, SNAPSHOT)
    report = await done(serving, COMPARE)
    assert report.result is OperationResult.UNSUPPORTED
    assert "Torch not compiled with CUDA enabled" in report.message


async def test_a_comparison_with_nothing_says_so(serving: FakePod) -> None:
    report = await done(serving, COMPARE)
    assert report.result is OperationResult.ERROR
    assert "take one first" in report.message


async def test_a_check_waits_for_the_move(serving: FakePod, versions: Versions) -> None:
    wanted = WeightMove("m", versions("2"), Step.PAUSE)
    await serving.put(serving.desired(move=wanted, operations=[CHECKSUM]))
    await serving.until(lambda r: r.move is not None and r.move.reached is Step.PAUSE)
    await asyncio.sleep(0.1)
    assert (await serving.report()).operations == []
    onward = WeightMove("m", versions("2"), Step.CONTINUE)
    assert (await done(serving, CHECKSUM, move=onward)).weight_version == "2"


async def test_a_check_that_the_agent_did_not_live_through_is_not_repeated(serving: FakePod) -> None:
    assert serving.engine is not None
    serving.engine.delays["/weights_checker"] = 2.0
    await serving.put(serving.desired(operations=[COMPARE]))
    await serving.until(lambda r: any(o.result is OperationResult.RUNNING for o in r.operations))
    await serving.stop_agent()
    await serving.start_agent()
    report = await done(serving, COMPARE)
    assert report.result is OperationResult.ERROR
    assert "ask again with another requestID" in report.message


async def test_a_check_has_a_deadline(serving: FakePod) -> None:
    assert serving.engine is not None
    serving.engine.delays["/weights_checker"] = 5.0
    report = await done(serving, Operation("slow", OperationKind.CHECKSUM, timeout_seconds=0.1))
    assert report.result is OperationResult.ERROR
    assert "/weights_checker did not answer within 0.1 s" in report.message


async def test_a_reset_is_of_the_process_that_was_meant(serving: FakePod) -> None:
    assert serving.engine is not None
    other = Operation("check:9", OperationKind.RESET, start_id="another")
    await serving.put(serving.desired(operations=[other]))
    await asyncio.sleep(0.1)
    assert (await serving.report()).operations == []
    assert "check reset_tensors" not in serving.engine.rules.calls


# --- flushes and aborts ---

FLUSH = Operation("flush:1", OperationKind.FLUSH, timeout_seconds=0.3)
ABORT = Operation("abort:1", OperationKind.ABORT)


def paused(mode: PauseMode) -> Execution:
    return Execution(ExecutionState.PAUSED, mode)


async def test_an_idle_engine_is_flushed_once(serving: FakePod) -> None:
    assert serving.engine is not None
    rules = serving.engine.rules
    await serving.generate(3)
    assert rules.cached
    assert (await done(serving, FLUSH)).result is OperationResult.PASSED
    assert not rules.cached
    await serving.put(serving.desired(generation=2, operations=[FLUSH]))
    await asyncio.sleep(0.1)
    assert rules.calls.count("flush") == 1


async def test_a_busy_engine_is_flushed_when_it_is_free(serving: FakePod) -> None:
    assert serving.engine is not None
    rules = serving.engine.rules
    running = asyncio.create_task(serving.generate(150))
    await eventually(lambda: rules.running > 0)
    patient = replace(FLUSH, timeout_seconds=30.0)
    await serving.put(serving.desired(operations=[patient]))
    await serving.until(lambda r: [o.result for o in r.operations] == [OperationResult.RUNNING])
    assert len((await running)["versions"]) == 150
    assert (await done(serving, patient)).result is OperationResult.PASSED


@pytest.mark.parametrize(
    ("pause", "release", "advice"),
    [
        (None, NEWEST, "pause the fleet (execution.state Paused, pauseMode Retract), or end what runs (abortRequests)"),
        (PauseMode.IN_PLACE, NEWEST, "set execution.pauseMode Retract"),
        (PauseMode.RETRACT, OLDEST, "SGLang 0.5.17 cannot flush while requests are queued: end them (abortRequests)"),
        (PauseMode.RETRACT, NEWEST, "their grammar is being compiled"),
    ],
)
async def test_an_engine_that_is_never_free_says_how_to_free_it(
    serving: FakePod, pause: PauseMode | None, release: Release, advice: str
) -> None:
    assert serving.engine is not None
    rules = serving.engine.rules
    rules.release = release
    if release is not NEWEST:
        await serving.stop_agent()
        await serving.start_agent()
    if pause is PauseMode.RETRACT and release is NEWEST:
        rules.grammar_queue = 1
    running = asyncio.create_task(serving.generate(100_000))
    await eventually(lambda: rules.running > 0)
    level = {"execution": paused(pause)} if pause else {}
    report = await done(serving, FLUSH, **level)
    assert report.result is OperationResult.ERROR
    assert report.message.startswith("the engine was not free for it within 0.3 s: ")
    assert advice in report.message
    running.cancel()


async def test_a_pause_does_not_wait_for_a_flush(serving: FakePod) -> None:
    assert serving.engine is not None
    rules = serving.engine.rules
    running = asyncio.create_task(serving.generate(100_000))
    await eventually(lambda: rules.running > 0)
    patient = replace(FLUSH, timeout_seconds=30.0)
    await serving.put(serving.desired(operations=[patient]))
    await serving.until(lambda r: r.operations != [])
    assert (await done(serving, patient, execution=paused(PauseMode.RETRACT))).result is OperationResult.PASSED
    running.cancel()


async def test_a_flush_goes_on_over_a_restart_of_the_agent(serving: FakePod) -> None:
    assert serving.engine is not None
    rules = serving.engine.rules
    rules.grammar_queue = 1
    patient = replace(FLUSH, timeout_seconds=30.0)
    await serving.put(serving.desired(operations=[patient]))
    await serving.until(lambda r: r.operations != [])
    await serving.stop_agent()
    await serving.start_agent()
    rules.grammar_queue = 0
    assert (await done(serving, patient)).result is OperationResult.PASSED


@pytest.mark.parametrize("pause", [None, PauseMode.RETRACT, PauseMode.IN_PLACE])
async def test_an_abort_ends_all_requests_once(serving: FakePod, pause: PauseMode | None) -> None:
    assert serving.engine is not None
    rules = serving.engine.rules
    running = [asyncio.create_task(serving.generate(100_000)) for _ in range(3)]
    await eventually(lambda: rules.running == 3)
    level = {"execution": paused(pause)} if pause else {}
    if pause:
        await serving.put(serving.desired(**level))
        await serving.until(lambda r: r.engine.paused)
    assert (await done(serving, ABORT, **level)).result is OperationResult.PASSED
    for answer in await asyncio.gather(*running):
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    aborts = rules.aborts
    await serving.stop_agent()
    await serving.start_agent()
    await serving.put(serving.desired(generation=3, operations=[ABORT], **level))
    await asyncio.sleep(0.1)
    assert rules.aborts == aborts


async def test_an_abort_frees_a_weight_move_that_waits_for_the_cache(serving: FakePod, versions: Versions) -> None:
    assert serving.engine is not None
    rules = serving.engine.rules
    rules.grammar_queue = 1  # keeps every flush from succeeding
    move = WeightMove("m", versions("2"), Step.CONTINUE)
    await serving.put(serving.desired(move=move))
    await eventually(lambda: rules.calls.count("flush") > 1)
    assert (await done(serving, ABORT, move=move)).result is OperationResult.PASSED
    await serving.until(lambda r: r.engine.weight_version == "2")
    assert not rules.violations


# --- profiles ---


async def test_a_profile_ends_with_its_traces_and_says_where(serving: FakePod) -> None:
    assert serving.engine is not None
    profile = Operation("profile:1", OperationKind.PROFILE, steps=5)
    await serving.put(serving.desired(operations=[profile]))
    await serving.until(lambda r: [o.result for o in r.operations] == [OperationResult.RUNNING])
    await serving.generate(8)
    report = await done(serving, profile)
    assert report.result is OperationResult.PASSED
    assert serving.record is not None
    folder = serving.settings.profile_dir / f"profile-1-{serving.record.start_id}"
    assert len(list(Path(folder).glob("*.trace.json.gz"))) == 1
    assert f"kubectl cp -n team-a -c agent fleet-e0-0:{folder} {folder.name}" in report.message
    assert serving.engine.rules.calls.count("profile 5") == 1


async def test_a_pause_does_not_wait_for_a_profile(serving: FakePod) -> None:
    profile = Operation("profile:1", OperationKind.PROFILE, steps=5)
    await serving.put(serving.desired(operations=[profile]))
    await serving.until(lambda r: r.operations != [])
    await serving.put(serving.desired(operations=[profile], execution=Execution(ExecutionState.PAUSED)))
    report = await serving.until(lambda r: r.engine.paused)
    assert report.operations[0].result is OperationResult.RUNNING


@pytest.mark.parametrize("listed", [True, False])
async def test_a_profile_that_does_not_end_is_stopped(serving: FakePod, listed: bool) -> None:
    assert serving.engine is not None
    rules = serving.engine.rules
    profile = Operation("profile:1", OperationKind.PROFILE, steps=5, timeout_seconds=0.3 if listed else 60.0)
    await serving.put(serving.desired(operations=[profile]))
    await serving.until(lambda r: r.operations != [])
    if listed:
        report = await done(serving, profile)
        assert report.result is OperationResult.ERROR
        assert "did not make 5 steps within 0.3 s: is there traffic?" in report.message
        assert "what it made until then: 1 traces in pod fleet-e0-0" in report.message
    else:
        await serving.put(serving.desired(generation=2))
        ended = await serving.until(lambda r: r.operations[0].result is OperationResult.ERROR)
        assert "it is no longer asked for" in ended.operations[0].message
    await eventually(lambda: rules.profile is None)
    assert rules.calls.count("stop profile") == 1


async def test_a_profile_goes_on_over_a_restart_of_the_agent(serving: FakePod) -> None:
    profile = Operation("profile:1", OperationKind.PROFILE, steps=5)
    await serving.put(serving.desired(operations=[profile]))
    assert serving.engine is not None
    rules = serving.engine.rules
    await eventually(lambda: rules.profile is not None)
    await serving.stop_agent()
    await serving.generate(8)
    await serving.start_agent()
    assert (await done(serving, profile)).result is OperationResult.PASSED
