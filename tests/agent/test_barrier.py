"""The fleet's barriers as one engine keeps them: what it does at them, and what it tells while it applies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_rollout.agent import actions, plan
from sglang_rollout.agent.control import _never_back
from sglang_rollout.agent.move_report import move_report
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


def applying(until: Step | None, **changes: object) -> Situation:
    """In the middle of an apply; until None: the order was withdrawn meanwhile."""
    move = None if until is None else WeightMove("m", NEW, until)
    given = Situation(
        desired=AgentDesired(1, 1, OLD, Execution(), move=move),
        facts=EngineFacts("s", EngineState.SERVING, OLD, ready=False),
        pause=PauseMode.RETRACT,
        dirty=True,
        progress=None if until is None else Progress("m", "s", prepared=True, flushed=True),
        now=10.0,
        applying=True,
    )
    return replace(given, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("until", [Step.APPLY, Step.CONTINUE])
@pytest.mark.parametrize("now", [True, False], ids=["under way", "to be repeated"])
def test_an_engine_that_applies_stands_at_the_barrier_and_is_not_dirty(until: Step, now: bool) -> None:
    report = move_report(applying(until, applying=now))
    assert report is not None
    assert (report.reached, report.dirty, report.error) == (Step.PAUSE, False, "")


def test_an_order_that_is_withdrawn_in_mid_apply_makes_the_engine_dirty_only_when_the_apply_is_over() -> None:
    assert move_report(applying(None)) is None
    over = move_report(applying(None, applying=False))
    assert over is not None
    assert over.dirty


@pytest.mark.parametrize(("before", "after", "kept"), [(3, 2, 3), (2, 3, 3), (4, 1, 4), (1, 1, 1)])
def test_until_only_grows(before: int, after: int, kept: int) -> None:
    def order(until: int, move_id: str = "m") -> AgentDesired:
        return AgentDesired(1, 1, OLD, Execution(), move=WeightMove(move_id, NEW, Step(until)))

    taken = _never_back(order(after), order(before)).move
    assert taken is not None
    assert taken.until == kept
    other = _never_back(order(after, "another"), order(before)).move
    assert other is not None
    assert other.until == after
