"""A label that is used again, with the operator's own planning in the middle: what the client asks for, step by step,
ends with the bytes of the last trainer on every engine, and the verdict is of that attempt."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from sglang_rollout.client.labels import Standing, standing, taken_back
from sglang_rollout.client.resource import distributed
from sglang_rollout.client.verdict import Attempt, Verdict, prepare_verdict, publish_verdict
from tests.transitions.simulation import Simulation, root_of

from .fake_fleet import merge

VERSION = "t1"
HERE, ELSEWHERE = "10.9.0.1:29600", "10.9.0.2:29600"


def patch(fleet: Simulation, weights: dict[str, Any]) -> None:
    spec = copy.deepcopy(fleet.object["spec"].get("weights") or {})
    merge(spec, weights)
    fleet.patch(weights=spec)


def ask(fleet: Simulation, sender: str, *, ahead: bool = False) -> tuple[Attempt, int]:
    """As the client does. Returns how often it had to look, too."""
    source = distributed([sender], "Staged", "Auto")
    wanted = {"version": VERSION, "source": source}
    for looks in range(20):
        found = standing(fleet.object, VERSION, [sender])
        assert not found.refusal
        if found.left:
            patch(fleet, taken_back(fleet.object, VERSION, source))
        elif not found.unseen:
            patch(fleet, {"prepare": wanted} if ahead else wanted)
            return Attempt(VERSION, fleet.rollout.metadata.generation), looks
        fleet.settle(1)
    raise AssertionError("the operator does not let go of it")


def ends(fleet: Simulation, attempt: Attempt, verdict: Callable[[Any, Attempt], Verdict | None]) -> Verdict:
    for _ in range(40):
        if (found := verdict(fleet.object, attempt)) is not None:
            return found
        fleet.settle(1)
    raise AssertionError(fleet.weights)


def committed(fleet: Simulation, attempt: Attempt) -> None:
    """By this attempt, with the bytes of the trainer that is there now."""
    found = ends(fleet, attempt, publish_verdict)
    root = root_of(VERSION, fleet.takes.get(VERSION, 0))
    assert (found.outcome, found.root) == ("Committed", root)
    fleet.settle(2)
    assert fleet.serving_roots() == {(VERSION, root)}


@pytest.fixture
def fleet() -> Simulation:
    made = Simulation()
    made.settle()
    return made


def another_take(fleet: Simulation) -> None:
    fleet.trainers = {VERSION}
    fleet.takes[VERSION] = fleet.takes.get(VERSION, 0) + 1


@pytest.mark.parametrize("sender", [HERE, ELSEWHERE])
def test_after_a_trainer_that_died(fleet: Simulation, sender: str) -> None:
    attempt, looks = ask(fleet, HERE)
    assert looks == 0
    assert ends(fleet, attempt, publish_verdict).outcome == "Failed"
    another_take(fleet)
    attempt, looks = ask(fleet, sender)
    assert looks <= 2, "at once, not after the operator's own time for trying again"
    committed(fleet, attempt)


def test_after_one_that_died_with_its_move_half_done(fleet: Simulation) -> None:
    """One engine has the first trainer's bytes, under this label and from this address."""
    fleet.trainers = {VERSION}
    first, _ = ask(fleet, HERE)
    fleet.reconcile()
    fast = min(uid for uid, pod in fleet.pods.items() if pod.engine_index is not None)
    for _ in range(3):
        fleet.hear(fast)
        fleet.run_pod(fast)
        fleet.deliver(fast)
        fleet.reconcile()
    assert fleet.weights.transaction is not None
    assert (fleet.weights.transaction.prepared, fleet.weights.transaction.decision) == (1, None)
    assert standing(fleet.object, VERSION, [ELSEWHERE]).refusal, "another trainer must wait"
    another_take(fleet)
    second, _ = ask(fleet, HERE)
    assert publish_verdict(fleet.object, second) is None
    committed(fleet, second)
    assert second.generation > first.generation


def test_what_was_staged_ahead_is_not_committed_for_other_bytes(fleet: Simulation) -> None:
    fleet.trainers = {VERSION}
    attempt, _ = ask(fleet, HERE, ahead=True)
    assert ends(fleet, attempt, prepare_verdict).outcome == "Prepared"
    another_take(fleet)
    attempt, _ = ask(fleet, HERE, ahead=True)
    assert prepare_verdict(fleet.object, attempt) is None, "what is there is of the attempt before"
    found = ends(fleet, attempt, prepare_verdict)
    assert (found.outcome, found.root) == ("Prepared", root_of(VERSION, 1))
    another_take(fleet)
    attempt, _ = ask(fleet, HERE)
    committed(fleet, attempt)


def test_a_failure_to_prepare_is_no_answer_for_the_next(fleet: Simulation) -> None:
    attempt, _ = ask(fleet, HERE, ahead=True)
    assert ends(fleet, attempt, prepare_verdict).outcome == "Failed"
    another_take(fleet)
    attempt, looks = ask(fleet, HERE, ahead=True)
    assert looks <= 2
    assert ends(fleet, attempt, prepare_verdict).outcome == "Prepared"


def test_a_committed_label_is_refused(fleet: Simulation) -> None:
    fleet.trainers = {VERSION}
    attempt, _ = ask(fleet, HERE)
    committed(fleet, attempt)
    assert "knows version t1 already" in standing(fleet.object, VERSION, [HERE]).refusal
    assert standing(fleet.object, "t2", [HERE]) == Standing()
