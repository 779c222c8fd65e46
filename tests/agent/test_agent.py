"""The agent as the operator sees it: over HTTP, with an engine that follows SGLang's rules."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from sglang_rollout.agent.control import Control
from sglang_rollout.protocol import pod as paths
from sglang_rollout.protocol.desired import Execution, ExecutionState
from sglang_rollout.protocol.report import TURNED_INTO_RETRACT, AgentIdentity, AgentReport, EngineState
from sglang_rollout.protocol.weights import KVCache, PauseMode, Step, WeightMove
from sglang_rollout.protocol.wire import dumps, loads

from . import checkpoints
from .conftest import Versions
from .fake_pod import FakePod, MakePod, eventually

PAUSED = Execution(ExecutionState.PAUSED, PauseMode.RETRACT)


def reached(step: Step) -> object:
    return lambda report: report.move is not None and report.move.reached is step


async def move(pod: FakePod, wanted: WeightMove, **changes: object) -> AgentReport:
    """Puts it and waits until it is where it should be, or has failed."""
    await pod.put(pod.desired(move=wanted, **changes))
    return await pod.until(
        lambda r: (
            r.move is not None
            and r.move.id == wanted.id
            and (r.move.reached is wanted.until or bool(r.move.error) or r.move.aborted)
        )
    )


# --- starting ---


async def test_an_engine_starts_at_the_fleets_version_without_the_operator(make_pod: MakePod) -> None:
    pod = await make_pod()
    assert (await pod.report()).engine.state is EngineState.ABSENT
    engine = await pod.launch()
    report = await pod.serving()
    assert report.engine.weight_version == "1"
    assert report.engine.model_path == pod.boot.path
    assert report.engine.data_key == engine.rules.data_key
    assert engine.rules.admin_key not in str(report)
    assert report.engine.sglang_version == "0.5.23"
    assert not report.engine.paused
    assert (await pod.call("GET", paths.PATH_READY))[0] == 200


async def test_the_operators_word_counts_over_the_fleets(make_pod: MakePod, versions: Versions) -> None:
    pod = await make_pod()
    await pod.put(pod.desired(boot=versions("2")))
    await pod.stop_agent()
    await pod.start_agent()
    await pod.launch()
    assert (await pod.serving()).engine.weight_version == "2"


async def test_a_boot_checkpoint_that_cannot_be_loaded_is_waited_for(make_pod: MakePod, versions: Versions) -> None:
    pod = await make_pod()
    broken = versions("2")
    tensors = Path(broken.path, "model.safetensors")
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[:-1])
    await pod.put(pod.desired(boot=broken))
    asked = asyncio.create_task(pod.ask_to_start("s1"))
    report = await pod.until(lambda r: r.engine.state is EngineState.WAITING and bool(r.engine.failure))
    assert report.engine.start_id == "s1"
    assert "cut off at tensor lm_head.weight" in report.engine.failure
    tensors.write_bytes(whole)
    status, order = await asked
    assert (status, order["weightVersion"]) == (200, "2")


async def test_the_end_of_an_engine_is_reported_with_its_reason(serving: FakePod) -> None:
    await serving.end_engine("it ran out of memory")
    report = await serving.until(lambda r: r.engine.state is EngineState.ABSENT)
    assert report.engine.failure == "it ran out of memory"
    assert not report.engine.data_key
    assert (await serving.call("GET", paths.PATH_READY))[0] == 503


# --- trust ---


@pytest.mark.parametrize("path", [paths.PATH_REPORT, paths.PATH_LAUNCH, paths.PATH_DRAIN, "/nothing"])
async def test_nobody_is_heard_without_a_token(serving: FakePod, path: str) -> None:
    for method in ("GET", "PUT", "POST"):
        assert (await serving.call(method, path, b"{}", token="no-token"))[0] == 401
        forbidden = serving.key.token(sub="system:serviceaccount:team-a:trainer")
        assert (await serving.call(method, path, b"{}", token=forbidden))[0] == 403


async def test_a_lower_lease_term_is_refused_also_after_a_restart(serving: FakePod) -> None:
    await serving.put(serving.desired(lease_term=7))
    await serving.stop_agent()
    await serving.start_agent()
    status, body = await serving.call("PUT", paths.PATH_DESIRED, dumps(serving.desired(lease_term=6)))
    assert status == 409
    assert b"lease term 6 is over" in body
    report = await serving.put(serving.desired(lease_term=8, generation=3))
    assert (report.lease_term, report.generation) == (8, 3)


async def test_what_is_open_holds_no_secret(serving: FakePod) -> None:
    status, body = await serving.call("GET", paths.PATH_IDENTITY, token="")
    assert status == 200
    assert serving.record is not None
    assert loads(AgentIdentity, body) == AgentIdentity("uid-0", 0, 0, serving.record.start_id)


async def test_a_malformed_order_changes_nothing(serving: FakePod) -> None:
    before = await serving.report()
    status, body = await serving.call("PUT", paths.PATH_DESIRED, b'{"leaseTerm": 99}')
    assert status == 400
    assert b"AgentDesired" in body
    assert (await serving.report()) == before


# --- execution ---


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
async def test_a_pause_holds_requests_and_loses_none(serving: FakePod, mode: PauseMode) -> None:
    running = asyncio.create_task(serving.generate(200))
    assert serving.engine is not None
    rules = serving.engine.rules
    await eventually(lambda: rules.running > 0)
    await serving.put(serving.desired(execution=Execution(ExecutionState.PAUSED, mode)))
    report = await serving.until(lambda r: r.engine.paused)
    assert report.engine.state is EngineState.SERVING
    assert (await serving.call("GET", paths.PATH_READY))[0] == 200
    waiting = asyncio.create_task(serving.generate(2))
    made = serving.engine.rules.tokens
    await asyncio.sleep(0.05)
    assert serving.engine.rules.tokens == made
    await serving.put(serving.desired(generation=2))
    await serving.until(lambda r: not r.engine.paused)
    assert len((await running)["versions"]) == 200
    assert len((await waiting)["versions"]) == 2


async def test_an_aborting_pause_ends_what_runs_once(serving: FakePod) -> None:
    assert serving.engine is not None
    running = asyncio.create_task(serving.generate(10_000))
    rules = serving.engine.rules
    await eventually(lambda: rules.running > 0)
    await serving.put(serving.desired(execution=Execution(ExecutionState.PAUSED, PauseMode.ABORT)))
    await serving.until(lambda r: r.engine.paused)
    waiting = asyncio.create_task(serving.generate(1))
    await serving.stop_agent()
    await serving.start_agent()
    await serving.until(lambda r: r.engine.paused)
    await serving.put(serving.desired(generation=2))
    assert (await running)["meta_info"]["finish_reason"] == {"type": "abort"}
    assert len((await waiting)["versions"]) == 1
    assert serving.engine.rules.calls.count("abort") == 2, "one sweep"


async def test_a_failed_health_check_is_not_taken_for_a_pause(serving: FakePod) -> None:
    assert serving.engine is not None
    await serving.put(serving.desired(execution=PAUSED))
    await serving.until(lambda r: r.engine.paused)
    serving.engine.rules.unhealthy = True  # somebody asked /health_generate meanwhile
    await serving.put(serving.desired(generation=2))
    await serving.until(lambda r: not r.engine.paused)
    await asyncio.sleep(0.1)
    assert serving.engine.rules.calls.count("continue") == 1


async def test_an_engine_whose_pause_failed_half_way_is_continued_all_the_same(serving: FakePod) -> None:
    assert serving.engine is not None
    await serving.put(serving.desired(execution=PAUSED))
    await serving.until(lambda r: r.engine.paused)
    await serving.put(serving.desired(generation=2))
    await serving.until(lambda r: not r.engine.paused)
    refusals = serving.engine.failures["/abort_request"] = [500] * 3
    await serving.put(serving.desired(generation=3, execution=Execution(ExecutionState.PAUSED, PauseMode.ABORT)))
    await eventually(lambda: len(refusals) < 3)
    await serving.put(serving.desired(generation=4))
    answer = await asyncio.wait_for(serving.generate(1), 10)
    assert len(answer["versions"]) == 1


# --- moves ---


# InPlace with Flush is refused by the API: SGLang cannot flush while requests run.
MODES_AND_CACHES = [
    (mode, cache) for mode in PauseMode for cache in KVCache if (mode, cache) != (PauseMode.IN_PLACE, KVCache.FLUSH)
]


@pytest.mark.parametrize(("mode", "cache"), MODES_AND_CACHES)
async def test_a_move_changes_the_version_between_two_tokens(
    serving: FakePod, versions: Versions, mode: PauseMode, cache: KVCache
) -> None:
    assert serving.engine is not None
    serving.engine.load_seconds = 0.05
    running = asyncio.create_task(serving.generate(100))
    rules = serving.engine.rules
    await eventually(lambda: rules.running > 0)
    report = await move(serving, WeightMove("m1", versions("2"), Step.CONTINUE, mode, cache))
    assert report.move is not None
    assert report.move.error == ""
    assert report.move.stall_seconds > 0.05
    assert (report.engine.weight_version, report.engine.paused) == ("2", False)
    answer = await running
    if mode is not PauseMode.ABORT:
        assert sorted(answer["versions"]) == answer["versions"]
        assert len(answer["versions"]) == 100
    assert (await serving.generate(2))["versions"] == ["2", "2"]
    assert not serving.engine.rules.violations


async def test_each_step_is_a_barrier(serving: FakePod, versions: Versions) -> None:
    assert serving.engine is not None
    rules = serving.engine.rules
    seen = []
    for step in (Step.PREPARE, Step.PAUSE, Step.APPLY, Step.CONTINUE):
        report = await move(serving, WeightMove("m1", versions("2"), step))
        await asyncio.sleep(0.05)
        seen.append((report.move and report.move.reached, rules.pause_mode, rules.version))
    assert seen == [
        (Step.PREPARE, None, "1"),
        (Step.PAUSE, "retract", "1"),
        (Step.APPLY, "retract", "2"),
        (Step.CONTINUE, None, "2"),
    ]
    assert rules.calls == ["pause retract", "flush", "load v2", "continue"]


async def test_a_move_under_a_pause_stays_paused(serving: FakePod, versions: Versions) -> None:
    assert serving.engine is not None
    await serving.put(serving.desired(execution=PAUSED))
    await serving.until(lambda r: r.engine.paused)
    report = await move(serving, WeightMove("m1", versions("2"), Step.CONTINUE), execution=PAUSED)
    assert report.engine.paused
    assert report.engine.weight_version == "2"
    assert serving.engine.rules.calls == ["pause retract", "flush", "load v2"]


async def test_an_abort_before_the_apply_goes_on_with_the_old_weights(serving: FakePod, versions: Versions) -> None:
    assert serving.engine is not None
    await move(serving, WeightMove("m1", versions("2"), Step.PAUSE))
    report = await move(serving, WeightMove("m1", versions("2"), Step.PAUSE, abort=True))
    assert report.move is not None
    assert report.move.aborted
    assert not report.engine.paused
    assert (await serving.generate(1))["versions"] == ["1"]


@pytest.mark.parametrize("gone", ["given up", "replaced"])
async def test_a_move_that_is_not_wanted_any_more_is_not_applied(
    serving: FakePod, versions: Versions, gone: str
) -> None:
    """Between the pause and the apply of an engine that reads by itself lies a wait for its device."""
    assert serving.engine is not None
    rules = serving.engine.rules
    serving.engine.delays["/weights_checker"] = 0.3
    wanted = WeightMove("m1", versions("2"), Step.CONTINUE, PauseMode.IN_PLACE, KVCache.KEEP)
    await serving.put(serving.desired(move=wanted))
    await eventually(lambda: rules.pause_mode == "in_place")
    other = WeightMove("m2", versions("1"), Step.PREPARE)
    await serving.put(serving.desired(move=replace(wanted, abort=True) if gone == "given up" else other))
    await serving.until(lambda r: not r.engine.paused)
    assert not [call for call in rules.calls if call.startswith("load")]
    assert (await serving.generate(1))["versions"] == ["1"]


async def test_an_abort_after_the_apply_is_too_late(serving: FakePod, versions: Versions) -> None:
    await move(serving, WeightMove("m1", versions("2"), Step.APPLY))
    report = await serving.put(serving.desired(move=WeightMove("m1", versions("2"), Step.APPLY, abort=True)))
    await asyncio.sleep(0.05)
    report = await serving.report()
    assert report.move is not None
    assert (report.move.reached, report.move.aborted, report.engine.paused) == (Step.APPLY, False, True)


async def test_a_wrong_checkpoint_never_reaches_the_engine(serving: FakePod, tmp_path: Path) -> None:
    assert serving.engine is not None
    tensors = {**checkpoints.TENSORS, "model.up.weight": ("BF16", [8, 4])}
    folder = checkpoints.write(tmp_path / "other", tensors)
    wrong = WeightMove("m1", serving.boot.__class__("2", str(folder)), Step.CONTINUE)
    report = await move(serving, wrong)
    assert report.move is not None
    assert report.move.refused
    assert not report.move.dirty
    assert "model.up.weight is [8, 4] BF16, the running model has [16, 4] BF16" in report.move.error
    assert serving.engine.rules.calls == []
    assert (await serving.generate(1))["versions"] == ["1"]


async def test_a_busy_cache_is_tried_again_while_the_old_weights_serve(serving: FakePod, versions: Versions) -> None:
    assert serving.engine is not None
    rules = serving.engine.rules
    rules.grammar_queue = 1
    await serving.put(serving.desired(move=WeightMove("m1", versions("2"), Step.CONTINUE)))
    await eventually(lambda: rules.calls.count("continue") >= 2)
    assert rules.calls[:6] == ["pause retract", "flush", "continue", "pause retract", "flush", "continue"]
    assert (await serving.generate(1))["versions"] == ["1"]
    rules.grammar_queue = 0
    await serving.until(lambda r: r.engine.weight_version == "2" and not r.engine.paused)
    assert not rules.violations


async def test_a_cache_that_stays_busy_is_an_error_and_nothing_has_changed(
    serving: FakePod, versions: Versions
) -> None:
    assert serving.engine is not None
    serving.engine.rules.grammar_queue = 1
    report = await move(serving, WeightMove("m1", versions("2"), Step.CONTINUE, timeout_seconds=0.4))
    assert report.move is not None
    assert "given up after 0.4 s: the cache cannot be flushed" in report.move.error
    assert not report.move.dirty
    assert not report.move.refused
    await serving.until(lambda r: not r.engine.paused)
    assert (await serving.generate(1))["versions"] == ["1"]


async def test_a_load_that_breaks_once_is_repeated_from_scratch(serving: FakePod, versions: Versions) -> None:
    assert serving.engine is not None
    rules = serving.engine.rules
    rules.fails_to_load = 1
    report = await move(serving, WeightMove("m1", versions("2"), Step.CONTINUE))
    assert report.move is not None
    assert report.move.error == ""
    assert rules.calls == ["pause retract", "flush", "load v2", "flush", "load v2", "continue"]
    assert not rules.violations


async def test_a_load_that_stays_broken_leaves_a_paused_engine_to_be_restarted(
    serving: FakePod, versions: Versions
) -> None:
    assert serving.engine is not None
    assert serving.record is not None
    rules = serving.engine.rules
    rules.fails_to_load = 9
    wanted = WeightMove("m1", versions("2"), Step.CONTINUE)
    report = await move(serving, wanted)
    assert report.move is not None
    assert report.move.dirty
    assert "half of them" in report.move.error
    assert report.engine.paused
    assert rules.calls[-1] == "load v2"
    assert (await serving.call("GET", paths.PATH_READY))[0] == 503
    # Also not by an execution level, an abort or a restart of the agent.
    await serving.put(serving.desired(generation=2, move=WeightMove("m1", versions("2"), Step.CONTINUE, abort=True)))
    await asyncio.sleep(0.05)
    assert rules.pause_mode == "retract"
    await serving.put(serving.desired(move=wanted, restart_engine=serving.record.start_id, boot=versions("2")))
    await serving.until(lambda r: r.engine.state is EngineState.ABSENT)
    await serving.launch()
    report = await serving.until(lambda r: r.move is not None and r.move.reached is Step.CONTINUE)
    assert report.engine.weight_version == "2"
    assert report.move is not None
    assert not report.move.dirty
    assert not rules.violations


async def test_a_later_move_takes_the_place_of_one_that_has_not_applied(serving: FakePod, versions: Versions) -> None:
    assert serving.engine is not None
    await move(serving, WeightMove("m1", versions("2"), Step.PAUSE))
    report = await move(serving, WeightMove("m2", versions("3"), Step.CONTINUE))
    assert report.engine.weight_version == "3"
    assert "load v2" not in serving.engine.rules.calls


async def test_an_agent_killed_while_the_engine_loads_applies_all_of_it_again(
    serving: FakePod, versions: Versions
) -> None:
    assert serving.engine is not None
    rules = serving.engine.rules
    serving.engine.load_seconds = 0.3
    await serving.put(serving.desired(move=WeightMove("m1", versions("2"), Step.CONTINUE)))
    await eventually(lambda: "load v2" in rules.calls)
    await serving.stop_agent()
    await serving.start_agent()
    report = await serving.until(lambda r: r.move is not None and r.move.reached is Step.CONTINUE)
    assert report.engine.weight_version == "2"
    assert rules.calls.count("load v2") == 2
    assert not rules.violations


async def test_an_engine_killed_while_it_loads_is_clean_again_when_it_is_back(
    serving: FakePod, versions: Versions
) -> None:
    assert serving.engine is not None
    serving.engine.load_seconds = 5.0
    rules = serving.engine.rules
    await serving.put(serving.desired(move=WeightMove("m1", versions("2"), Step.CONTINUE)))
    await eventually(lambda: "load v2" in rules.calls)
    await serving.end_engine("SIGKILL")
    await serving.launch()
    report = await serving.until(lambda r: r.move is not None and r.move.reached is Step.CONTINUE)
    assert (report.engine.weight_version, report.engine.paused) == ("2", False)
    assert not rules.violations


# --- restarts, probes, drain ---


async def test_only_the_named_start_is_killed(serving: FakePod) -> None:
    assert serving.record is not None
    await serving.put(serving.desired(restart_engine="another"))
    await asyncio.sleep(0.05)
    assert serving.kills == []
    await serving.put(serving.desired(restart_engine=serving.record.start_id))
    await serving.until(lambda r: r.engine.state is EngineState.ABSENT)
    await serving.launch()
    await serving.serving()
    assert len(serving.kills) == 1


async def test_a_restart_waits_for_the_requests(serving: FakePod) -> None:
    assert serving.engine is not None
    assert serving.record is not None
    rules = serving.engine.rules
    running = asyncio.create_task(serving.generate(100))
    await eventually(lambda: rules.running > 0)
    await serving.put(serving.desired(restart_engine=serving.record.start_id, restart_drains=True))
    assert len((await running)["versions"]) == 100
    report = await serving.until(lambda r: r.engine.state is EngineState.ABSENT)
    assert report.engine.failure == "", "what is ordered is no failure"
    assert "abort" not in rules.calls


async def test_a_restart_lets_those_run_that_a_pause_holds(serving: FakePod) -> None:
    assert serving.engine is not None
    assert serving.record is not None
    rules = serving.engine.rules
    running = asyncio.create_task(serving.generate(100))
    await eventually(lambda: rules.running > 0)
    paused = Execution(ExecutionState.PAUSED)
    await serving.put(serving.desired(execution=paused))
    await serving.until(lambda r: r.engine.paused)
    await serving.put(serving.desired(execution=paused, restart_engine=serving.record.start_id, restart_drains=True))
    assert len((await running)["versions"]) == 100
    await serving.until(lambda r: r.engine.state is EngineState.ABSENT)


async def test_a_restart_aborts_what_takes_too_long(serving: FakePod) -> None:
    assert serving.engine is not None
    assert serving.record is not None
    rules = serving.engine.rules
    running = asyncio.create_task(serving.generate(100_000))
    await eventually(lambda: rules.running > 0)
    await serving.put(serving.desired(restart_engine=serving.record.start_id, restart_drains=True))
    assert (await running)["meta_info"]["finish_reason"] == {"type": "abort"}
    await serving.until(lambda r: r.engine.state is EngineState.ABSENT)


async def test_a_restart_finishes_nothing_that_nobody_may_have(serving: FakePod) -> None:
    assert serving.engine is not None
    assert serving.record is not None
    rules = serving.engine.rules
    running = asyncio.create_task(serving.generate(100_000))
    await eventually(lambda: rules.running > 0)
    await serving.put(serving.desired(restart_engine=serving.record.start_id))
    await serving.until(lambda r: r.engine.state is EngineState.ABSENT)
    assert rules.calls == []
    with pytest.raises(aiohttp.ClientError):
        await running


async def test_a_restart_that_the_launcher_did_not_carry_out_is_asked_for_again(serving: FakePod) -> None:
    assert serving.record is not None
    serving.refuses_kills = 2
    await serving.put(serving.desired(restart_engine=serving.record.start_id))
    await serving.until(lambda r: r.engine.state is EngineState.ABSENT)
    assert serving.kills == ["the operator ordered a restart"] * 3


async def test_an_engine_that_does_not_tell_its_requests_is_restarted_all_the_same(serving: FakePod) -> None:
    assert serving.engine is not None
    assert serving.record is not None
    serving.engine.failures["/v1/loads"] = [500] * 1000
    await serving.put(serving.desired(restart_engine=serving.record.start_id, restart_drains=True))
    await serving.until(lambda r: r.engine.state is EngineState.ABSENT)


async def test_a_wedged_engine_is_killed(serving: FakePod) -> None:
    assert serving.engine is not None
    serving.engine.rules.wedged = True
    await serving.put(serving.desired(probe_seconds=0.3))
    report = await serving.until(lambda r: bool(r.probe_failure))
    assert "did not end within 0.3 s" in report.probe_failure
    await serving.until(lambda r: r.engine.state is EngineState.ABSENT)
    assert serving.kills == [report.probe_failure]
    await serving.launch()
    assert (await serving.serving()).probe_failure == ""


async def test_a_saturated_engine_is_not_killed(serving: FakePod) -> None:
    """No new request gets a token within the deadline, but others make some all the time."""
    assert serving.engine is not None
    serving.engine.delays["/generate"] = 60.0
    await serving.put(serving.desired(probe_seconds=0.2))
    for _ in range(50):
        serving.engine.rules.tokens += 1
        await asyncio.sleep(0.02)
    assert serving.kills == []


async def test_a_paused_engine_is_not_probed(serving: FakePod) -> None:
    assert serving.engine is not None
    await serving.put(serving.desired(execution=PAUSED, probe_seconds=0.1))
    await asyncio.sleep(0.6)
    assert serving.kills == []
    assert serving.engine.rules.tokens == 0


async def test_an_idle_engine_is_probed_again_and_again(serving: FakePod) -> None:
    assert serving.engine is not None
    rules = serving.engine.rules
    await serving.put(serving.desired(probe_seconds=0.2))
    await eventually(lambda: rules.tokens >= 3)
    assert serving.kills == []


async def test_a_drain_waits_for_what_runs(serving: FakePod) -> None:
    running = asyncio.create_task(serving.generate(50))
    await asyncio.sleep(0.02)
    await serving.put(serving.desired(drain=True))
    report = await serving.until(lambda r: r.drained)
    assert report.engine.state is EngineState.STOPPING
    assert len((await running)["versions"]) == 50
    assert (await serving.call("GET", paths.PATH_READY))[0] == 503


async def test_a_drain_ends_what_takes_too_long(serving: FakePod) -> None:
    running = asyncio.create_task(serving.generate(100_000))
    await asyncio.sleep(0.02)
    await serving.put(serving.desired(drain=True))
    await serving.until(lambda r: r.drained)
    assert (await running)["meta_info"]["finish_reason"] == {"type": "abort"}


async def test_a_long_pause_in_place_becomes_a_retract_and_says_so(make_pod: MakePod) -> None:
    pod = await make_pod()
    await pod.put(pod.desired())
    await pod.launch(watchdog_seconds=0.6)
    await pod.serving()
    assert pod.engine is not None
    running = asyncio.create_task(pod.generate(100))
    rules = pod.engine.rules
    await eventually(lambda: rules.running > 0)
    await pod.put(pod.desired(execution=Execution(ExecutionState.PAUSED, PauseMode.IN_PLACE)))
    report = await pod.until(lambda r: r.message.startswith(TURNED_INTO_RETRACT))
    assert report.engine.paused
    assert rules.calls == ["pause in_place", "pause retract"]
    await pod.put(pod.desired(generation=2))
    assert len((await running)["versions"]) == 100
    await pod.until(lambda r: r.message == "")


@pytest.mark.parametrize("turns", range(8))
async def test_an_agent_ends_though_it_is_woken_just_then(
    serving: FakePod, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """wait_for of Python 3.11 gives what it waited for and forgets that it was cancelled. turns: of the event loop."""
    controls: list[Control] = []
    run = Control.run

    async def running(control: Control) -> None:
        controls.append(control)
        await run(control)

    monkeypatch.setattr(Control, "run", running)
    await serving.stop_agent()
    await serving.start_agent()
    await asyncio.sleep(0.1)
    controls[0].look()
    for _ in range(turns):
        await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await serving.stop_agent()
