"""Models of other layouts, by way of the stage: what each rank holds is what it would have read by itself."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from e2e.sglang_cpu import models
from sglang_rollout.protocol.report import AgentReport
from sglang_rollout.protocol.weights import Step, WeightMove, WeightVersion

from .local_pod import LocalPod

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio, pytest.mark.timeout(600)]


def settled(move_id: str, report: AgentReport) -> bool:
    move = report.move
    return move is not None and move.id == move_id and (move.reached is Step.CONTINUE or move.error != "")


@pytest.mark.parametrize(
    ("model", "tp"),
    [
        pytest.param("qwen3-tied", 1, id="tied"),
        pytest.param("llama", 1, id="llama", marks=pytest.mark.chaos),
        pytest.param("qwen3-mixed", 1, id="bf16-and-fp32", marks=pytest.mark.chaos),
        pytest.param("qwen3-moe", 1, id="experts"),
        pytest.param("qwen3", 2, id="tp2", marks=pytest.mark.chaos),
    ],
)
async def test_there_and_back(tmp_path: Path, model: str, tp: int) -> None:
    one, two = (WeightVersion(label, str(models.path(f"{model}-v{label}"))) for label in ("1", "2"))
    local = LocalPod(tmp_path, one, tp=tp, staged_versions=2)
    local.start_agent()
    local.start_launcher()
    try:
        await local.serving()
        expected = {"1": await local.checksum()}
        await local.admin_call("/pause_generation", {"mode": "retract"})
        body = {"model_path": two.path, "weight_version": "2"}
        await local.admin_call("/update_weights_from_disk", body)
        expected["2"] = await local.checksum()
        await local.admin_call("/update_weights_from_disk", {"model_path": one.path, "weight_version": "1"})
        await local.admin_call("/continue_generation", {})
        for number, weights in enumerate((two, one, two)):
            wanted = WeightMove(f"m{number}", weights, Step.CONTINUE)
            await local.put(local.desired(move=wanted))
            report = await local.until(partial(settled, wanted.id))
            assert report.move is not None
            assert report.move.error == ""
            assert report.engine.weights_root == report.move.root != ""
            assert await local.checksum() == expected[weights.version]
            assert (await local.generate(4))["meta_info"]["weight_version"] == weights.version
    finally:
        await local.stop()
