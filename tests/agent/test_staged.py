"""Weights that go by way of the stage: read beside the running engine, checked by its ranks, put in within one session,
and found again after the agent's, the engine's or the move's end."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from sglang_rollout.agent import stage_room
from sglang_rollout.agent.settings import StageSettings
from sglang_rollout.agent.sglang_versions import RELEASES, Release
from sglang_rollout.protocol.desired import GroupAssignment
from sglang_rollout.protocol.launch import LaunchOrder
from sglang_rollout.protocol.memory import LaunchOptions, MemoryOrder, MemoryTag
from sglang_rollout.protocol.report import AgentReport
from sglang_rollout.protocol.weights import (
    KVCache,
    PauseMode,
    Source,
    SourceKind,
    Step,
    Verify,
    WeightMove,
    WeightVersion,
)
from tests.free_ports import free_port

from . import checkpoints
from .conftest import Versions
from .fake_pod import FakePod, MakePod, eventually


@pytest.fixture
def staging(tmp_path: Path) -> StageSettings:
    return StageSettings("Host", 2, 4096, tmp_path / "stage")


@pytest_asyncio.fixture
async def pod(make_pod: MakePod, staging: StageSettings) -> FakePod:
    """A pod with room for two versions, whose engine serves version 1."""
    made = await make_pod(stage=staging)
    await made.launch()
    await made.serving()
    return made


def order(weights: WeightVersion, until: Step = Step.CONTINUE, **changes: Any) -> WeightMove:
    return WeightMove(**{"id": f"to-{weights.version}", "weights": weights, "until": until, **changes})


async def move(pod: FakePod, wanted: WeightMove, **desired: Any) -> AgentReport:
    """Until it has come as far as it should, or has failed."""
    await pod.put(pod.desired(move=wanted, **desired))
    return await pod.until(
        lambda r: (
            r.move is not None and r.move.id == wanted.id and (r.move.reached >= wanted.until or r.move.error != "")
        )
    )


@pytest.mark.parametrize("verify", list(Verify))
async def test_the_checksum_of_what_was_put_in_is_reported_where_it_was_asked_for(
    pod: FakePod, versions: Versions, verify: Verify
) -> None:
    asked = verify is Verify.CHECKSUM
    wanted = order(versions("2"), verify=verify)
    report = await move(pod, wanted)
    assert (report.engine.weights_checksum != "", report.engine.weights_sharding != "") == (asked, asked)
    await pod.stop_agent()
    await pod.start_agent()
    again = await pod.serving()
    assert again.engine.weights_checksum == report.engine.weights_checksum
    await move(pod, order(versions("1")))
    assert (await pod.report()).engine.weights_checksum == "", "it was of other weights"


def held(report: AgentReport) -> list[str]:
    return [one.version for one in report.stage.held]


def problems(pod: FakePod) -> list[str]:
    assert pod.engine is not None
    return pod.engine.rules.violations


async def test_an_engine_is_reported_as_serving_only_when_its_ranks_have_the_stage(
    make_pod: MakePod, staging: StageSettings
) -> None:
    pod = await make_pod(stage=staging)
    engine = await pod.launch()
    await pod.put(pod.desired())
    await pod.serving()
    assert engine.rules.calls[:3] == ["begin", "hook register", "end"]
    assert (await pod.report()).stage.problem == ""


async def test_a_move_from_disk_goes_by_way_of_the_stage(pod: FakePod, versions: Versions) -> None:
    assert pod.engine is not None
    rules = pod.engine.rules
    rules.calls.clear()
    report = await move(pod, order(versions("2")))
    assert report.move is not None
    assert (report.move.error, report.move.dirty, report.move.reached) == ("", False, Step.CONTINUE)
    assert (report.engine.weight_version, report.engine.model_path) == ("2", versions("2").path)
    assert report.move.root == report.engine.weights_root == report.stage.held[0].root != ""
    assert report.move.staged_bytes == report.move.of_bytes == report.stage.held[0].size > 0
    assert rules.path == versions("1").path  # SGLang did not read it
    begun, checked, applied = ["begin", "hook check", "end"], ["begin"], ["hook apply", "end", "label 2"]
    assert rules.calls == ["pause retract", "flush", *begun, *checked, *applied, "continue"]
    assert (await pod.generate(3))["versions"] == ["2"] * 3
    assert problems(pod) == []


async def test_ranks_that_know_the_layout_are_not_asked_again(pod: FakePod, versions: Versions) -> None:
    await move(pod, order(versions("2")))
    assert pod.engine is not None
    rules = pod.engine.rules
    rules.calls.clear()
    report = await move(pod, order(versions("3")))
    assert "hook check" not in rules.calls
    assert report.engine.weight_version == "3"
    assert sorted(held(report)) == ["2", "3"]


async def test_the_agent_s_restart_forgets_neither_stage_nor_what_is_held(pod: FakePod, versions: Versions) -> None:
    before = await move(pod, order(versions("2")))
    await pod.stop_agent()
    await pod.start_agent()
    report = await pod.serving()
    assert report.stage.held == before.stage.held
    assert report.engine.weights_root == before.engine.weights_root
    assert (report.engine.weight_version, report.engine.model_path) == ("2", versions("2").path)
    assert pod.engine is not None
    assert pod.engine.rules.calls.count("hook register") == 1


async def test_an_engine_that_starts_again_catches_up_from_the_kept_copy(pod: FakePod, versions: Versions) -> None:
    report = await move(pod, order(versions("2")))
    root = report.engine.weights_root
    await pod.end_engine("killed")
    await pod.launch()
    await pod.serving()
    assert (await pod.report()).engine.weight_version == "1"
    kept = order(replace(versions("2"), path=""), id="again", source=Source(SourceKind.KEPT, root=root))
    report = await move(pod, kept)
    assert report.move is not None
    assert (report.move.error, report.engine.weight_version, report.engine.weights_root) == ("", "2", root)
    assert problems(pod) == []


async def test_a_staged_move_needs_a_stage(make_pod: MakePod, versions: Versions) -> None:
    pod = await make_pod()
    await pod.launch()
    await pod.serving()
    source = Source(SourceKind.STAGED, ["127.0.0.1:1"], members=1)
    report = await move(pod, order(replace(versions("2"), path=""), source=source))
    assert report.move is not None
    assert report.move.refused
    assert "set agent.staging.medium to Host or Device" in report.move.error
    report = await move(pod, order(versions("3")))
    assert (report.engine.weight_version, report.engine.model_path) == ("3", versions("3").path)


async def test_what_does_not_fit_is_told_with_numbers_and_the_engine_reads_by_itself(
    make_pod: MakePod, staging: StageSettings, versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_room, "LEFT_BYTES", 1 << 60)
    monkeypatch.setattr(stage_room, "SHARE_LEFT", 1)
    pod = await make_pod(stage=staging)
    await pod.launch()
    report = await pod.serving()
    assert "does not fit into the pod's shared memory" in report.stage.problem
    assert "set engine.sharedMemorySize to " in report.stage.problem
    report = await move(pod, order(versions("2")))
    assert (report.engine.weight_version, report.move and report.move.root) == ("2", "")
    report = await move(pod, order(WeightVersion("3", ""), source=Source(SourceKind.STAGED, ["127.0.0.1:1"])))
    assert report.move is not None
    assert report.move.refused
    assert "sharedMemorySize" in report.move.error


async def test_an_engine_without_the_loader_is_never_called_by_it(pod: FakePod, versions: Versions) -> None:
    await pod.end_engine("killed")
    await pod.launch(stage=None)
    await pod.serving()
    report = await move(pod, order(versions("2")))
    assert report.engine.weight_version == "2"
    assert "without the weight loader" in report.stage.problem
    assert problems(pod) == []


async def test_ranks_that_cannot_take_it_leave_the_old_weights_serving(pod: FakePod, versions: Versions) -> None:
    assert pod.engine is not None
    pod.engine.rules.refuses = "tensor model.up.weight does not fit"
    report = await move(pod, order(versions("2")))
    assert report.move is not None
    assert not report.move.dirty
    assert "rank 0 (Tiny): tensor model.up.weight does not fit" in report.move.error
    report = await pod.until(lambda r: not r.engine.paused)
    assert (await pod.generate(2))["versions"] == ["1"] * 2
    assert problems(pod) == []


async def test_a_rank_that_says_nothing_is_not_taken_for_one_that_can(
    make_pod: MakePod, staging: StageSettings, versions: Versions
) -> None:
    pod = await make_pod(stage=staging)
    engine = await pod.launch(ranks=2)
    await pod.serving()
    engine.rules.silent_ranks = 1
    report = await move(pod, order(versions("2"), timeout_seconds=1.0))
    assert report.move is not None
    assert "rank 1 has not said" in report.move.error
    assert not report.move.dirty
    assert "hook apply" not in engine.rules.calls
    engine.rules.silent_ranks = 0
    report = await move(pod, order(versions("3")))
    assert report.engine.weight_version == "3"
    # Now they know the layout, so the apply is what is not answered: anything may be in.
    engine.rules.silent_ranks = 1
    report = await move(pod, order(versions("4")))
    assert report.move is not None
    assert report.move.dirty
    assert report.engine.paused
    assert report.engine.weights_root == report.engine.weight_version == ""


async def test_a_load_that_breaks_is_made_again_from_the_stage(pod: FakePod, versions: Versions) -> None:
    assert pod.engine is not None
    pod.engine.rules.fails_to_load = 1
    report = await move(pod, order(versions("2")))
    assert report.engine.weight_version == "2"
    assert pod.engine.rules.calls.count("hook apply") == 2
    pod.engine.rules.fails_to_load = 2
    report = await move(pod, order(versions("3")))
    assert report.move is not None
    assert report.move.dirty
    assert report.engine.paused
    assert problems(pod) == []


async def test_a_wrong_checkpoint_is_refused_before_a_byte_is_read(
    pod: FakePod, versions: Versions, tmp_path: Path
) -> None:
    wrong = checkpoints.write(tmp_path / "wrong", {**checkpoints.TENSORS, "model.up.weight": ("BF16", [8, 4])})
    report = await move(pod, order(WeightVersion("9", str(wrong))))
    assert report.move is not None
    assert report.move.refused
    assert "model.up.weight is [8, 4] BF16" in report.move.error


async def test_values_that_are_not_finite_are_refused_or_counted(
    pod: FakePod, tmp_path: Path, versions: Versions
) -> None:
    bad = WeightVersion("9", str(checkpoints.write(tmp_path / "bad", fill=0xFF)))
    report = await move(pod, order(bad))
    assert report.move is not None
    assert report.move.refused
    assert "Inf or NaN" in report.move.error
    assert "model.embed.weight (32)" in report.move.error
    report = await move(pod, order(bad, id="allowed", source=Source(allow_nonfinite=True)))
    assert report.move is not None
    assert (report.move.error, report.move.nonfinite) == ("", 32 + 64 + 32)


async def test_weights_staged_ahead_are_there_at_once(pod: FakePod, versions: Versions) -> None:
    assert pod.engine is not None
    ahead = order(versions("2"), Step.PREPARE, id="ahead")
    await pod.put(pod.desired(prepare=ahead))
    report = await pod.until(lambda r: r.prepare is not None and r.prepare.reached is Step.PREPARE)
    assert report.prepare is not None
    assert held(report) == ["2"]
    assert pod.engine.rules.calls == ["begin", "hook register", "end"]
    # The folder may be gone by now: what is staged is what is moved.
    (Path(versions("2").path) / "model.safetensors").unlink()
    report = await move(pod, order(WeightVersion("2", str(Path(versions("1").path).with_name("v2")))))
    assert report.engine.weights_root == report.stage.held[0].root


async def test_a_second_attempt_reads_the_folder_anew(pod: FakePod, versions: Versions) -> None:
    two = versions("2")
    first = await move(pod, order(two, Step.PREPARE, id="g1.1:2"))
    checkpoints.write(Path(two.path), fill=0x55)
    again = await move(pod, order(two, Step.PREPARE, id="g1.2:2"))
    assert first.move is not None
    assert again.move is not None
    assert first.move.root != again.move.root


async def test_an_order_that_is_withdrawn_ends_its_reading(
    pod: FakePod, versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pod.put(pod.desired(move=order(versions("2"), Step.PREPARE)))
    await pod.put(pod.desired(move=order(versions("3"), Step.PREPARE)))
    report = await pod.until(lambda r: r.move is not None and r.move.id == "to-3" and r.move.reached is Step.PREPARE)
    assert report.move is not None
    assert report.move.error == ""


@pytest.mark.parametrize(("mode", "cache"), [(PauseMode.IN_PLACE, KVCache.KEEP), (PauseMode.ABORT, KVCache.FLUSH)])
async def test_every_pause_takes_from_the_stage(
    pod: FakePod, versions: Versions, mode: PauseMode, cache: KVCache
) -> None:
    report = await move(pod, order(versions("2"), pause_mode=mode, kv_cache=cache))
    assert report.engine.weight_version == "2"
    assert problems(pod) == []


@pytest.mark.parametrize("row", RELEASES, ids=str)
async def test_in_place_needs_no_fence_where_our_loader_waits(
    make_pod: MakePod, staging: StageSettings, versions: Versions, row: Release
) -> None:
    pod = await make_pod(stage=staging)
    engine = await pod.launch(release=row)
    await pod.serving()
    running = asyncio.create_task(pod.generate(300))
    await eventually(lambda: engine.rules.running > 0)
    await move(pod, order(versions("2"), pause_mode=PauseMode.IN_PLACE, kv_cache=KVCache.KEEP))
    assert "pause in_place" in engine.rules.calls
    assert not {"fence", "pause retract"} & set(engine.rules.calls)
    assert problems(pod) == []
    await running


async def test_a_fleet_stands_at_its_barrier_with_everything_checked(pod: FakePod, versions: Versions) -> None:
    assert pod.engine is not None
    wanted = order(versions("2"), Step.PAUSE)
    report = await move(pod, wanted)
    assert report.engine.paused
    assert "hook check" in pod.engine.rules.calls
    assert "hook apply" not in pod.engine.rules.calls
    await pod.stop_agent()
    await pod.start_agent()
    report = await pod.until(lambda r: r.move is not None and r.move.reached is Step.PAUSE)
    assert pod.engine.rules.calls.count("continue") == 0
    report = await move(pod, replace(wanted, until=Step.APPLY))
    assert report.engine.paused
    report = await move(pod, replace(wanted, until=Step.CONTINUE))
    assert not report.engine.paused


async def test_an_agent_killed_in_an_apply_puts_all_of_it_in_again(pod: FakePod, versions: Versions) -> None:
    assert pod.engine is not None
    pod.engine.load_seconds = 0.3
    await pod.put(pod.desired(move=order(versions("2"))))
    await eventually(lambda: pod.engine is not None and "hook apply" in pod.engine.rules.calls)
    await pod.stop_agent()
    await pod.start_agent()
    report = await pod.until(lambda r: r.move is not None and r.move.reached is Step.CONTINUE)
    assert report.engine.weight_version == "2"
    assert pod.engine.rules.calls.count("hook apply") == 2
    assert problems(pod) == []


async def test_with_room_for_one_the_slot_is_taken_only_when_nothing_needs_it(
    make_pod: MakePod, staging: StageSettings, versions: Versions
) -> None:
    pod = await make_pod(stage=replace(staging, versions=1))
    await pod.launch()
    await pod.serving()
    report = await move(pod, order(versions("2"), Step.PAUSE), prepare=order(versions("3"), Step.PREPARE, id="ahead"))
    assert held(report) == ["2"]
    await pod.put(pod.desired(move=order(versions("2")), prepare=order(versions("3"), Step.PREPARE, id="ahead")))
    report = await pod.until(lambda r: r.prepare is not None and r.prepare.reached is Step.PREPARE)
    assert (held(report), report.engine.weight_version) == (["3"], "2")
    assert problems(pod) == []


async def test_weights_lost_to_a_release_come_back_from_the_stage(
    make_pod: MakePod, staging: StageSettings, versions: Versions
) -> None:
    pod = await make_pod(stage=staging)
    pod.shared["launch"] = LaunchOptions(memory_saver=True)
    await pod.put(pod.desired())
    engine = await pod.launch()
    await pod.serving()
    report = await move(pod, order(versions("2")))
    root = report.engine.weights_root
    await pod.put(pod.desired(memory=MemoryOrder([MemoryTag.WEIGHTS, MemoryTag.KV_CACHE], drain_seconds=0.1)))
    report = await pod.until(lambda r: len(r.engine.released) == 2)
    assert report.engine.weights_void
    assert report.engine.weights_root == ""
    await pod.put(pod.desired(memory=MemoryOrder([])))
    await pod.until(lambda r: not r.engine.released)
    (Path(versions("2").path) / "model.safetensors").unlink()
    again = order(WeightVersion("2", ""), id="reload", source=Source(SourceKind.KEPT, root=root))
    report = await move(pod, again, memory=MemoryOrder([]))
    assert report.move is not None
    assert (report.move.error, report.engine.weights_void, report.engine.weights_root) == ("", "", root)
    assert (await pod.generate(2))["versions"] == ["2"] * 2
    assert engine.rules.violations == []


async def test_a_trainer_that_is_lost_is_made_good_by_a_peer(
    make_pod: MakePod, staging: StageSettings, versions: Versions, tmp_path: Path
) -> None:
    """The same order tells later who has what did not come."""
    peer = await make_pod(stage=staging)
    await peer.launch()
    await peer.serving()
    await peer.put(peer.desired(prepare=order(versions("2"), Step.PREPARE), peer_key="secret"))
    report = await peer.until(lambda r: r.prepare is not None and r.prepare.reached is Step.PREPARE)
    root = report.stage.held[0].root

    pod = await make_pod(stage=replace(staging, folder=tmp_path / "other"))
    await pod.launch()
    await pod.serving()
    gone = Source(SourceKind.STAGED, ["127.0.0.1:9"], members=2)
    wanted = order(WeightVersion("2", ""), source=gone, timeout_seconds=5.0)
    report = await move(pod, wanted, peer_key="secret")
    assert report.move is not None
    assert report.move.error
    assert not report.move.refused
    address = f"{peer.settings.pod_ip}:{peer.settings.agent_port}"
    report = await move(pod, replace(wanted, source=replace(gone, root=root, peers=[address])), peer_key="secret")
    assert report.move is not None
    assert (report.move.error, report.engine.weight_version, report.engine.weights_root) == ("", "2", root)
    # A version that nobody keeps any more comes from its folder, if it has one.
    lost = Source(SourceKind.KEPT, root="ab" * 32, peers=[address])
    report = await move(pod, order(WeightVersion("3", ""), source=lost, timeout_seconds=5.0), peer_key="secret")
    assert report.move is not None
    assert "it lies in no folder" in report.move.error
    report = await move(pod, order(versions("3"), id="from-folder", source=lost), peer_key="secret")
    assert report.engine.weight_version == "3"


async def test_the_pods_of_one_engine_are_heard_each(
    make_pod: MakePod, staging: StageSettings, versions: Versions, tmp_path: Path
) -> None:
    port = free_port()
    away = replace(staging, folder=tmp_path / "other")
    other = await make_pod(rank=1, nodes=2, ip="127.0.0.2", agent_port=port, stage=away)
    pod = await make_pod(rank=0, nodes=2, agent_port=port, stage=staging)
    group = GroupAssignment(1, pod.settings.pod_uid, pod.settings.pod_ip)
    for one in (pod, other):
        one.shared = {"group": group, "peer_key": "secret"}
    pod.shared["fellows"] = [f"{other.settings.pod_ip}:{other.settings.agent_port}"]
    for one in (pod, other):
        await one.put(one.desired())
    launch = LaunchOrder(versions("1").path, "1")
    await pod.ask_to_start("s0")
    await other.ask_to_start("s1")
    engine = await pod.run_engine("s0", launch, ranks=2, other_stages=(other.settings.stage.folder,))
    await other.run_engine("s1", launch)
    for one in (pod, other):
        await one.serving()
    wanted = order(versions("2"), Step.PREPARE)
    await other.put(other.desired(move=wanted))
    await other.until(lambda r: r.move is not None and r.move.reached is Step.PREPARE)
    await other.put(other.desired(move=replace(wanted, until=Step.CONTINUE)))
    report = await move(pod, replace(wanted, until=Step.CONTINUE))
    assert (report.move and report.move.error, report.engine.weight_version) == ("", "2")
    assert engine.rules.violations == []
    # The other pod has not staged it: nothing of it is put into either.
    engine.rules.calls.clear()
    engine.rules.layouts.clear()
    await pod.stop_agent()
    await pod.start_agent()
    report = await move(pod, order(versions("3"), timeout_seconds=1.0))
    assert report.move is not None
    assert "rank 1" in report.move.error
    assert "are not staged here" in report.move.error
    assert not report.move.dirty
    assert "hook apply" not in engine.rules.calls
