"""What is known of the engine while several look at it, and while its answers tell more than was read."""

from __future__ import annotations

import asyncio
import time

import pytest_asyncio

from sglang_rollout.agent.engine_watch import EngineWatch
from sglang_rollout.protocol.weights import WeightVersion

from .fake_pod import FakePod


@pytest_asyncio.fixture
async def watch(serving: FakePod) -> EngineWatch:
    """Another one than the agent's own."""
    assert serving.session is not None
    made = EngineWatch(serving.settings, serving.session, time.monotonic)
    await made.observe()
    return made


async def test_a_look_that_began_earlier_does_not_put_back_what_was_so_before(
    serving: FakePod, watch: EngineWatch
) -> None:
    assert serving.engine is not None
    serving.engine.delays["/ready"] = 0.3  # the label has been read when the engine's answers say more
    early = asyncio.create_task(watch.observe())
    await asyncio.sleep(0.15)
    watch.assume(weights=WeightVersion("2", "/models/v2"), ready=False)
    await early
    assert (watch.facts.weights.version, watch.facts.ready) == ("2", False)
    serving.engine.delays.clear()
    await watch.observe()
    assert (watch.facts.weights.version, watch.facts.ready) == ("1", True), "the next look reads it"


async def test_of_two_looks_the_later_one_counts(serving: FakePod, watch: EngineWatch) -> None:
    assert serving.engine is not None
    serving.engine.delays["/ready"] = 0.3
    early = asyncio.create_task(watch.observe())
    await asyncio.sleep(0.15)
    serving.engine.rules.version = "2"
    serving.engine.delays.clear()
    await asyncio.gather(early, watch.observe())
    assert watch.facts.weights.version == "2"
