"""The order of steps that release and resume memory, as a table: what is so -> what comes next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sglang_rollout.agent import actions, plan
from sglang_rollout.agent.situation import Emptying, EngineFacts, Progress, Situation
from sglang_rollout.protocol.desired import AgentDesired, Execution, ExecutionState
from sglang_rollout.protocol.memory import LaunchOptions, MemoryOrder, MemoryTag
from sglang_rollout.protocol.report import TURNED_INTO_RETRACT, EngineState
from sglang_rollout.protocol.weights import PauseMode, Step, WeightMove, WeightVersion

W, K, C = MemoryTag.WEIGHTS, MemoryTag.KV_CACHE, MemoryTag.CUDA_GRAPH
V1, V2 = WeightVersion("1", "/m/1"), WeightVersion("2", "/m/2")
RETRACT, IN_PLACE = PauseMode.RETRACT, PauseMode.IN_PLACE
PAUSED = Execution(ExecutionState.PAUSED)
FACTS = EngineFacts("s", EngineState.SERVING, V1, ready=True, launch=LaunchOptions(memory_saver=True))


def situation(order: set[MemoryTag] | None, execution: Execution = PAUSED, **changes: Any) -> Situation:
    memory = None if order is None else MemoryOrder(sorted(order), drain_seconds=30.0)
    desired = AgentDesired(1, 1, V1, execution, memory=memory, move=changes.pop("move", None))
    made = Situation(desired=desired, facts=FACTS, pause=None, dirty=False, progress=None, now=1000.0)
    return replace(made, **changes)


def emptying(requests: int, seconds_ago: float = 0.0, emptied: bool = False) -> Emptying:
    return Emptying("s", 1000.0 - seconds_ago, 1000.0 - min(seconds_ago, 1.0), requests, emptied)


@pytest.mark.parametrize(
    ("given", "step"),
    [
        (situation({W, K, C}), actions.LookAtLoad()),
        (situation({W, K, C}, pause=RETRACT), actions.LookAtLoad()),
        (situation({W, K, C}, pause=RETRACT, emptying=emptying(2)), actions.Continue()),
        (situation({W, K, C}, emptying=emptying(2)), actions.Nothing("waiting for 2 requests to end", 1000.1)),
        (situation({W, K, C}, emptying=emptying(2, 5)), actions.LookAtLoad()),
        (situation({W, K, C}, emptying=emptying(2, 31)), actions.Pause(RETRACT)),
        (situation({W, K, C}, emptying=emptying(0)), actions.Pause(RETRACT)),
        (situation({W, K, C}, pause=IN_PLACE, paused_since=999.0, emptying=emptying(0)), actions.Pause(RETRACT)),
        (situation({W, K, C}, pause=RETRACT, emptying=emptying(0)), actions.Empty()),
        (situation({W, K, C}, pause=RETRACT, emptying=emptying(2, 31)), actions.Empty()),
        (situation({W, K, C}, pause=RETRACT, emptying=emptying(0, 1, emptied=True)), actions.Release((C, K))),
        (
            situation({W, K, C}, pause=RETRACT, released=frozenset({K, C}), emptying=emptying(0, 1, emptied=True)),
            actions.Release((W,)),
        ),
        (situation({W, K, C}, pause=RETRACT, released=frozenset({K, C})), actions.Empty()),
        (situation({K}, pause=RETRACT, emptying=emptying(0, 1, emptied=True)), actions.Release((K,))),
        (situation(set(), pause=RETRACT, released=frozenset({W, K, C})), actions.Resume((W,))),
        (situation(set(), pause=RETRACT, released=frozenset({K, C})), actions.Resume((K,))),
        (situation(set(), pause=RETRACT, released=frozenset({C})), actions.Resume((C,))),
        (situation({K}, pause=RETRACT, released=frozenset({W, K, C})), actions.Resume((W,))),
        (situation({W, K, C}, pause=RETRACT, released=frozenset({W, K, C})), actions.Nothing()),
        (situation(None, pause=RETRACT, released=frozenset({W, K, C})), actions.Nothing()),
    ],
)
def test_the_next_step(given: Situation, step: actions.Action) -> None:
    assert plan.next_action(given) == step


def test_a_call_without_an_answer_ends_the_engine() -> None:
    step = plan.next_action(situation(set(), pause=RETRACT, released=frozenset({K}), unsure=True))
    assert isinstance(step, actions.Kill)


@pytest.mark.parametrize("execution", [PAUSED, Execution()])
def test_an_engine_without_weights_stays_paused(execution: Execution) -> None:
    assert plan.next_action(situation(set(), execution, pause=None, void="reset:1")) == actions.Pause(RETRACT)
    step = plan.next_action(situation(set(), execution, pause=RETRACT, void="released:1"))
    assert isinstance(step, actions.Nothing)
    assert "until a version is moved into it" in step.why


def test_a_void_engine_is_not_at_the_version_that_it_shows() -> None:
    move = WeightMove("m", V1, Step.CONTINUE)
    progress = Progress("m", "s", prepared=True, flushed=True)
    given = situation(set(), move=move, progress=progress, pause=RETRACT, void="released:1")
    assert plan.next_action(given) == actions.Apply(move)


def test_without_memory_for_weights_none_are_moved_in() -> None:
    move = WeightMove("m", V2, Step.CONTINUE)
    given = situation(
        {W, K, C},
        move=move,
        progress=Progress("m", "s", prepared=True),
        pause=RETRACT,
        released=frozenset({W, K, C}),
    )
    step = plan.next_action(given)
    assert isinstance(step, actions.Nothing)
    assert "there is no memory for weights" in step.why


# --- pauses in place, and SGLang's watchdog ---


@pytest.mark.parametrize(
    ("watchdog", "seconds", "turns"),
    [(300.0, 199.0, False), (300.0, 200.0, True), (60.0, 41.0, True), (0.0, 9e9, False)],
)
def test_a_pause_in_place_ends_before_the_watchdog_does_it(watchdog: float, seconds: float, turns: bool) -> None:
    execution = Execution(ExecutionState.PAUSED, IN_PLACE)
    facts = replace(FACTS, ready=False, watchdog_seconds=watchdog)
    given = situation(None, execution, facts=facts, pause=IN_PLACE, paused_since=1000.0 - seconds)
    step = plan.next_action(given)
    assert step == (actions.Pause(RETRACT, turned=True) if turns else actions.Nothing())


def test_a_turned_pause_is_told() -> None:
    execution = Execution(ExecutionState.PAUSED, IN_PLACE)
    step = plan.next_action(situation(None, execution, pause=RETRACT, turned=True))
    assert isinstance(step, actions.Nothing)
    assert step.why.startswith(TURNED_INTO_RETRACT)
    # Whoever asks for a retract has got it.
    assert plan.next_action(situation(None, PAUSED, pause=RETRACT, turned=True)) == actions.Nothing()
