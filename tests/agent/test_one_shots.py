"""One-shot operations as the operator sees them: done once for each engine process, and then only reported."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sglang_rollout.agent import one_shot_steps
from sglang_rollout.protocol.desired import Execution, ExecutionState
from sglang_rollout.protocol.operations import Operation, OperationKind, OperationReport, OperationResult
from sglang_rollout.protocol.report import EngineState
from sglang_rollout.protocol.weights import Step, WeightMove

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
    return report.operations[0]


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
    await serving.until(lambda r: r.operations == [])


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
        await serving.until(lambda r: r.operations == [])
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
