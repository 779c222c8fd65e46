"""Weights by way of the stage into real SGLang on CPU: the bytes that an engine holds are those that it would have read
by itself, whatever is killed on the way."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from e2e.sglang_cpu import models
from sglang_rollout.agent.fault_points import EXIT_CODE
from sglang_rollout.protocol.report import AgentReport, EngineState
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

from .local_pod import LocalPod, serving_pod

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1200)]


def version(label: str, model: str) -> WeightVersion:
    return WeightVersion(label, str(models.path(model)))


STEPS = ("prepare", "pause", "flush", "check", "apply", "continue")
POINTS = [
    *(f"stage:{when}" for when in ("begin", "mid", "end")),
    *(f"{step}:{when}" for step in STEPS for when in ("before", "after")),
    *(f"apply:{when}" for when in ("begun", "written", "labelled")),
]
CHOSEN = ("stage:mid", "check:after", "apply:begun", "apply:written", "apply:labelled")
V1, V2, V3 = version("1", "qwen3-v1"), version("2", "qwen3-v2"), version("3", "qwen3-v3")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def local(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalPod]:
    async with serving_pod(tmp_path_factory.mktemp("pod"), V1, staged_versions=2) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def checksums(local: LocalPod) -> dict[str, str]:
    """Of each version, as SGLang itself loads it from its folder. It goes back to the first one."""
    found = {"1": await local.checksum()}
    for weights in (V2, V3):
        body = {"model_path": weights.path, "flush_cache": True, "weight_version": weights.version}
        await local.admin_call("/pause_generation", {"mode": "retract"})
        await local.admin_call("/update_weights_from_disk", body)
        found[weights.version] = await local.checksum()
    body = {"model_path": V1.path, "flush_cache": True, "weight_version": "1"}
    await local.admin_call("/update_weights_from_disk", body)
    await local.admin_call("/continue_generation", {})
    assert await local.checksum() == found["1"]
    assert len(set(found.values())) == 3
    return found


def settled(wanted: WeightMove, report: AgentReport) -> bool:
    return (
        report.move is not None
        and report.move.id == wanted.id
        and (report.move.reached >= wanted.until or report.move.error != "")
    )


async def move(local: LocalPod, wanted: WeightMove) -> AgentReport:
    await local.put(local.desired(move=wanted))
    report = await local.until(lambda r: settled(wanted, r))
    assert report.move is not None
    assert report.move.error == ""
    return report


async def holds(local: LocalPod, weights: WeightVersion, checksums: dict[str, str]) -> None:
    """Label and bytes are of the version, and it serves."""
    report = await local.until(lambda r: r.engine.weight_version == weights.version and not r.engine.paused)
    assert report.engine.weights_root in [one.root for one in report.stage.held]
    answer = await local.generate(4)
    assert answer["meta_info"]["weight_version"] == weights.version
    assert await local.checksum() == checksums[weights.version]


@pytest.mark.parametrize(
    ("weights", "mode", "cache"),
    [
        (V2, PauseMode.RETRACT, KVCache.FLUSH),
        (V3, PauseMode.IN_PLACE, KVCache.KEEP),
        (V1, PauseMode.ABORT, KVCache.FLUSH),
        (V2, PauseMode.RETRACT, KVCache.KEEP),
    ],
)
async def test_there_and_back(
    local: LocalPod, checksums: dict[str, str], weights: WeightVersion, mode: PauseMode, cache: KVCache
) -> None:
    wanted = WeightMove(f"to-{weights.version}-{mode}", weights, Step.CONTINUE, mode, cache, verify=Verify.CHECKSUM)
    report = await move(local, wanted)
    assert report.move is not None
    print(f"{mode}: prepared in {report.move.prepare_seconds} s, stall {report.move.stall_seconds} s")
    await holds(local, weights, checksums)


async def test_a_stream_spans_a_commit_and_says_so(local: LocalPod, checksums: dict[str, str]) -> None:
    await move(local, WeightMove("before-span", V1, Step.CONTINUE))
    ahead = WeightMove("ahead-of-span", V3, Step.PREPARE)
    await local.put(local.desired(prepare=ahead))
    await local.until(lambda r: r.prepare is not None and r.prepare.reached is Step.PREPARE)
    chunks, moving = [], None
    async for chunk in local.stream(400):
        chunks.append(chunk)
        if len(chunks) == 20:
            moving = asyncio.create_task(move(local, WeightMove("span", V3, Step.CONTINUE)))
    assert moving is not None
    await moving
    spans = chunks[-1]["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["1", "3"]
    assert spans[0]["end"] == spans[1]["start"]
    assert spans[1]["end"] == 400
    await holds(local, V3, checksums)


@pytest.mark.parametrize("point", [pytest.param(p, marks=[] if p in CHOSEN else pytest.mark.chaos) for p in POINTS])
async def test_an_agent_that_ends_at_any_step_brings_the_move_to_its_end(
    local: LocalPod, checksums: dict[str, str], point: str
) -> None:
    held = (await local.report()).engine.weight_version
    weights = next(one for one in (V1, V2, V3) if one.version != held)
    # A start without faults left behind: the layout is not known to it, so that it checks.
    await local.kill_agent()
    local.faults = f"{point}=exit"
    local.start_agent()
    await local.serving()
    wanted = WeightMove(f"{point}-{held}", weights, Step.CONTINUE)
    await local.put(local.desired(move=wanted))
    assert await local.agent_ended() == EXIT_CODE
    local.faults = ""
    local.start_agent()
    report = await local.until(lambda r: settled(wanted, r))
    assert report.move is not None
    assert report.move.error == ""
    await holds(local, weights, checksums)


@pytest.mark.parametrize("point", ["apply:begun", pytest.param("apply:written", marks=pytest.mark.chaos)])
async def test_an_engine_that_is_killed_in_an_apply_catches_up_from_the_kept_copy(
    local: LocalPod, checksums: dict[str, str], point: str
) -> None:
    await move(local, WeightMove(f"before-{point}", V1, Step.CONTINUE))
    await local.kill_agent()
    local.faults = f"{point}=kill-engine"
    local.start_agent()
    await local.serving()
    wanted = WeightMove(f"killed-{point}", V2, Step.CONTINUE)
    await local.put(local.desired(move=wanted))
    assert await local.launcher_ended() != 0
    report = await local.until(lambda r: r.engine.state is EngineState.ABSENT)
    root = next(one.root for one in report.stage.held if one.version == "2")
    local.start_launcher()
    # The order still stands, as it would with an operator that is away.
    report = await local.serving()
    kept = replace(
        wanted, id=f"kept-{point}", weights=WeightVersion("2", ""), source=Source(SourceKind.KEPT, root=root)
    )
    report = await move(local, kept)
    assert report.engine.weights_root == root
    await holds(local, WeightVersion("2", ""), checksums)


@pytest.mark.chaos
async def test_an_engine_killed_while_it_serves_catches_up(local: LocalPod, checksums: dict[str, str]) -> None:
    report = await move(local, WeightMove("before-kill", V3, Step.CONTINUE))
    root = report.engine.weights_root
    os.kill(local.record.pid, signal.SIGKILL)
    await local.launcher_ended()
    await local.put(local.desired(move=None))
    local.start_launcher()
    await local.serving()
    assert (await local.report()).engine.weight_version == "1"
    kept = WeightMove("kept", WeightVersion("3", ""), Step.CONTINUE, source=Source(SourceKind.KEPT, root=root))
    await move(local, kept)
    await holds(local, WeightVersion("3", ""), checksums)
