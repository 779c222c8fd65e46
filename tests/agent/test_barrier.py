"""What an engine does whose cache could not be flushed, by how far the fleet has come."""

from __future__ import annotations

import pytest

from sglang_rollout.agent import actions, plan
from sglang_rollout.agent.situation import EngineFacts, Progress, Situation
from sglang_rollout.protocol.desired import AgentDesired, Execution
from sglang_rollout.protocol.report import EngineState
from sglang_rollout.protocol.weights import PauseMode, Step, WeightMove, WeightVersion

OLD, NEW = WeightVersion("1", "/m/1"), WeightVersion("2", "/m/2")


@pytest.mark.parametrize(
    ("until", "step"),
    [
        # Nobody has applied: the old weights may serve for a moment, so that the cache gets free.
        (Step.PAUSE, actions.Continue()),
        # An engine that moves alone, in a wave or to catch up.
        (Step.CONTINUE, actions.Continue()),
        # Others of the fleet may have applied: it waits where it stands.
        (Step.APPLY, actions.Nothing("the cache is busy", 12.0)),
    ],
)
def test_the_old_weights_go_on_only_before_the_barrier(until: Step, step: actions.Action) -> None:
    given = Situation(
        desired=AgentDesired(1, 1, OLD, Execution(), move=WeightMove("m", NEW, until)),
        facts=EngineFacts("s", EngineState.SERVING, OLD, ready=False),
        pause=PauseMode.RETRACT,
        dirty=False,
        progress=Progress("m", "s", prepared=True, problem="the cache is busy", retry_at=12.0),
        now=10.0,
    )
    assert plan.next_action(given) == step
