"""Pauses that fail half way: whatever is asked next, the engine follows it."""

from __future__ import annotations

import asyncio

from sglang_rollout.protocol.desired import Execution, ExecutionState
from sglang_rollout.protocol.weights import PauseMode

from .fake_pod import FakePod, eventually

ABORTED = Execution(ExecutionState.PAUSED, PauseMode.ABORT)


async def test_an_engine_whose_pause_failed_half_way_is_continued(serving: FakePod) -> None:
    """It is paused, its requests could not be aborted, and the agent has continued it once before."""
    assert serving.engine is not None
    rules = serving.engine.rules
    await serving.put(serving.desired(generation=2, execution=Execution(ExecutionState.PAUSED)))
    await serving.until(lambda r: r.engine.paused)
    await serving.put(serving.desired(generation=3))
    await serving.until(lambda r: not r.engine.paused)
    serving.engine.failures["/abort_request"] = [500] * 1000
    await serving.put(serving.desired(generation=4, execution=ABORTED))
    await eventually(lambda: rules.pause_mode is not None)
    await asyncio.sleep(0.2)
    await serving.put(serving.desired(generation=5))
    await eventually(lambda: rules.pause_mode is None)
    assert len((await serving.generate(3))["versions"]) == 3


async def test_a_pause_that_failed_half_way_is_made_whole(serving: FakePod) -> None:
    assert serving.engine is not None
    rules = serving.engine.rules
    running = asyncio.create_task(serving.generate(10_000))
    await eventually(lambda: rules.running > 0)
    serving.engine.failures["/abort_request"] = [500] * 2
    await serving.put(serving.desired(generation=2, execution=ABORTED))
    assert (await running)["meta_info"]["finish_reason"] == {"type": "abort"}
    report = await serving.until(lambda r: r.engine.paused)
    assert report.generation == 2
