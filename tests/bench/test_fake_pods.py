"""The fake agents and sidecars of the benchmark do what real ones do."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from e2e.bench.fake_pods import FakeAgent, FakeSidecar
from sglang_rollout.protocol.desired import AgentDesired, Execution, ExecutionState
from sglang_rollout.protocol.routing import RouterDesired, Worker
from sglang_rollout.protocol.weights import Step, WeightMove, WeightVersion
from sglang_rollout.serving.errors import Superseded

BOOT = WeightVersion("1", "/models/1")
NEXT = WeightVersion("2", "/models/2")
RUNNING = AgentDesired(1, 1, BOOT, Execution())
PAUSED = replace(RUNNING, execution=Execution(ExecutionState.PAUSED))


async def ordered(agent: FakeAgent, desired: AgentDesired) -> None:
    answer = agent.accept(desired)
    assert answer.generation == desired.generation
    await asyncio.sleep(0)


async def test_an_order_is_answered_before_it_is_obeyed() -> None:
    agent = FakeAgent.serving("uid", "127.0.0.1", BOOT)
    answer = agent.accept(PAUSED)
    assert answer.generation == 1
    assert not answer.engine.paused
    await asyncio.sleep(0)
    assert agent.report.engine.paused
    assert agent.report.revision > answer.revision


async def test_orders_of_a_deposed_operator_are_refused() -> None:
    agent = FakeAgent.serving("uid", "127.0.0.1", BOOT)
    agent.accept(replace(RUNNING, lease_term=3))
    with pytest.raises(Superseded):
        agent.accept(replace(RUNNING, lease_term=2))


async def test_a_move_goes_as_far_as_it_may_and_keeps_the_engine_paused_between() -> None:
    agent = FakeAgent.serving("uid", "127.0.0.1", BOOT)
    seen = []
    for step in (Step.PREPARE, Step.PAUSE, Step.APPLY, Step.CONTINUE):
        await ordered(agent, replace(RUNNING, move=WeightMove("m", NEXT, step)))
        assert agent.report.move is not None
        assert agent.report.move.reached is step
        seen.append((agent.report.engine.paused, agent.report.engine.weight_version))
    assert seen == [(False, "1"), (True, "1"), (True, "2"), (False, "2")]
    assert list(agent.reached_at) == [Step.PREPARE, Step.PAUSE, Step.APPLY, Step.CONTINUE]
    assert agent.report.move is not None
    assert agent.report.move.stall_seconds > 0


async def test_a_move_is_given_up_only_before_it_has_applied() -> None:
    agent = FakeAgent.serving("uid", "127.0.0.1", BOOT)
    move = WeightMove("m", NEXT, Step.PAUSE)
    await ordered(agent, replace(RUNNING, move=move))
    await ordered(agent, replace(RUNNING, move=replace(move, abort=True)))
    assert agent.report.move is not None
    assert agent.report.move.aborted
    assert (agent.report.engine.paused, agent.report.engine.weight_version) == (False, "1")


async def test_a_router_is_in_step_right_after_it_was_told() -> None:
    sidecar = FakeSidecar.idle("uid", "127.0.0.1")
    worker = Worker("http://10.0.0.1:30000", "key", "f-e0", 1, "1")
    answer = sidecar.accept(RouterDesired(1, "a", [worker]))
    assert not answer.in_step
    await asyncio.sleep(0)
    assert sidecar.board.report.in_step
    assert [one.url for one in sidecar.board.report.registered] == [worker.url]
