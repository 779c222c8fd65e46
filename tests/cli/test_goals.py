"""When a verb is done, has failed, or goes on waiting."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_rollout.cli import goals, patches
from sglang_rollout.cli.fleet_report import parse
from sglang_rollout.cli.goals import Asked, Goal
from tests.api.objects import Object, merged
from tests.cli.fake_cluster import condition, engine
from tests.kube_access.fake_connection import fleet

LATER = "2026-01-02T03:04:05Z"
CONSISTENT = condition("WeightsConsistent", True)


def state_of(goal: Goal, value: Object) -> tuple[str, str]:
    progress = goal(parse(value))
    return progress.state, progress.message


def execution_status(state: str, *paused: bool, reason: str = "") -> Object:
    conditions = [condition("Progressing", True, reason, "on the way")] if reason else []
    engines = [engine(index, paused=one) for index, one in enumerate(paused)]
    return {"executionState": state, "engines": engines, "conditions": conditions}


@pytest.mark.parametrize(
    ("wanted", "status", "expected"),
    [
        ("Paused", {}, "Waiting"),
        ("Paused", execution_status("Pausing", True, False), "Waiting"),
        ("Paused", execution_status("Paused", True, True), "Done"),
        ("Paused", execution_status("Paused", True, True, reason="AgentsBehind"), "Waiting"),
        ("Paused", execution_status("Paused", True, False, reason="EnginesStarting"), "Done"),
        ("Running", execution_status("Paused", True, True), "Waiting"),
        ("Running", execution_status("Resuming", True, False, reason="Resuming"), "Waiting"),
        ("Running", execution_status("Running", False, False), "Done"),
    ],
)
def test_execution(wanted: str, status: Object, expected: str) -> None:
    assert state_of(goals.execution(wanted), fleet(status=status))[0] == expected


def memory_status(weights: str, kv: str, graph: str, *released: list[str], state: str = "Paused") -> Object:
    memory = {"weights": weights, "kvCache": kv, "cudaGraph": graph}
    engines = [engine(index, released=one, paused=state == "Paused") for index, one in enumerate(released)]
    return {"memory": memory, "engines": engines, "executionState": state}


@pytest.mark.parametrize(
    ("residency", "tags", "state", "status", "expected"),
    [
        ("Released", ["kvCache"], None, memory_status("Resident", "Released", "Resident", ["kvCache"]), "Done"),
        ("Released", ["kvCache"], None, memory_status("Resident", "Resident", "Resident", ["kvCache"], []), "Waiting"),
        ("Released", ["kvCache", "cudaGraph"], None, memory_status("Resident", "Released", "Resident"), "Waiting"),
        ("Resident", ["kvCache"], None, memory_status("Resident", "Resident", "Resident", [], []), "Done"),
        ("Resident", ["kvCache"], None, memory_status("Resident", "Resident", "Resident", [], ["kvCache"]), "Waiting"),
        ("Resident", ["kvCache"], None, memory_status("Released", "Resident", "Resident", ["weights"]), "Done"),
        ("Resident", ["kvCache"], "Running", memory_status("Resident", "Resident", "Resident", []), "Waiting"),
        (
            "Resident",
            ["kvCache"],
            "Running",
            memory_status("Resident", "Resident", "Resident", [], state="Running"),
            "Done",
        ),
    ],
)
def test_memory(residency: str, tags: list[str], state: str | None, status: Object, expected: str) -> None:
    assert state_of(goals.memory(residency, tags, state), fleet(status=status))[0] == expected


def test_a_fleet_of_no_engines_has_released_all() -> None:
    status = memory_status("Resident", "Resident", "Resident")

    assert state_of(goals.memory("Released", ["kvCache"]), fleet(status=status, replicas=0))[0] == "Done"


def weights_status(serving: str, target: str, phase: str, *conditions: Object, **transaction: Any) -> Object:
    move = {"transaction": {"id": "t", "version": "43", **transaction}} if transaction else {}
    weights = {"version": serving, "targetVersion": target, "phase": phase, **move}
    return {"weights": weights, "engines": [engine(0, weightVersion=serving)], "conditions": list(conditions)}


@pytest.mark.parametrize(
    ("status", "expected", "said"),
    [
        ({}, "Waiting", "waiting for the engines"),
        (weights_status("42", "42", "Idle", CONSISTENT), "Waiting", ""),
        (weights_status("42", "43", "Staging", prepared=1), "Waiting", "Staging: 1 prepared, 0 committed of 1"),
        (weights_status("43", "43", "Committing", CONSISTENT, prepared=1, committed=1), "Waiting", "Committing"),
        (weights_status("43", "43", "Idle", condition("WeightsConsistent", False)), "Waiting", ""),
        (weights_status("43", "43", "Idle", CONSISTENT), "Done", "1 of 1 engines serve 43"),
        (weights_status("43", "43", "Idle", CONSISTENT, stallSeconds="0.047"), "Done", "none waited longer than 0.047"),
        # The next weights are staged already; these are served all the same.
        (weights_status("43", "43", "Prepared", CONSISTENT), "Done", ""),
        (weights_status("42", "43", "Failed", message="no config.json"), "Failed", "no config.json; 42 serves on"),
        # An older move failed: not the one that is waited for.
        (weights_status("42", "41", "Failed", message="x", version="41"), "Waiting", ""),
    ],
)
def test_weights(status: Object, expected: str, said: str) -> None:
    state, message = state_of(goals.weights("43"), fleet(status=status))

    assert state == expected
    assert said in message


@pytest.mark.parametrize(
    ("goal", "status", "expected"),
    [
        (goals.weight_check("7"), {}, "Waiting"),
        (goals.weight_check("7"), {"lastWeightCheck": {"requestID": "6", "result": "Passed"}}, "Waiting"),
        (goals.weight_check("7"), {"lastWeightCheck": {"requestID": "7"}}, "Waiting"),
        (goals.weight_check("7"), {"lastWeightCheck": {"requestID": "7", "result": "Running"}}, "Waiting"),
        (goals.weight_check("7"), {"lastWeightCheck": {"requestID": "7", "result": "Passed"}}, "Done"),
        (goals.weight_check("7"), {"lastWeightCheck": {"requestID": "7", "result": "Mismatch"}}, "Failed"),
        (goals.weight_check("7"), {"lastWeightCheck": {"requestID": "7", "result": "Unsupported"}}, "Failed"),
        (goals.weight_check("7"), {"lastWeightCheck": {"requestID": "7", "completionTime": LATER}}, "Failed"),
        (goals.profile("2"), {"lastProfile": {"requestID": "2", "completionTime": LATER}}, "Failed"),
        (goals.profile("2"), {"lastProfile": {"requestID": "2", "result": "Running"}}, "Waiting"),
        (goals.profile("2"), {"lastProfile": {"requestID": "1", "result": "Completed"}}, "Waiting"),
        (goals.profile("2"), {"lastProfile": {"requestID": "2", "result": "Completed"}}, "Done"),
        (goals.profile("2"), {"lastProfile": {"requestID": "2", "result": "Error"}}, "Failed"),
        (goals.flush_cache("3"), {"lastFlushCache": {"requestID": "2", "result": "Completed"}}, "Waiting"),
        (goals.flush_cache("3"), {"lastFlushCache": {"requestID": "3", "result": "Completed"}}, "Done"),
        (goals.flush_cache("3"), {"lastFlushCache": {"requestID": "3", "result": "Error"}}, "Failed"),
        (goals.abort_requests("4"), {"lastAbortRequests": {"requestID": "4", "result": "Running"}}, "Waiting"),
        (goals.abort_requests("4"), {"lastAbortRequests": {"requestID": "4", "result": "Completed"}}, "Done"),
        (goals.abort_requests("4"), {"lastAbortRequests": {"requestID": "4", "completionTime": LATER}}, "Failed"),
        (goals.restart("1"), {"lastRestart": {"requestID": "0", "completionTime": LATER}}, "Waiting"),
        (goals.restart("1"), {"lastRestart": {"requestID": "1", "restarted": 1}}, "Waiting"),
        (goals.restart("1"), {"lastRestart": {"requestID": "1", "completionTime": LATER}}, "Done"),
    ],
)
def test_operations(goal: Goal, status: Object, expected: str) -> None:
    assert state_of(goal, fleet(status=status))[0] == expected


PAUSE = patches.execution("Paused")
DONE = execution_status("Paused", True)


def degraded(reason: str, message: str, generation: int = 2) -> Object:
    return {"conditions": [condition("Degraded", True, reason, message, generation)]}


@pytest.mark.parametrize(
    ("generation", "spec", "status", "expected", "said"),
    [
        # What an older generation says does not count, however well it fits.
        (2, PAUSE, DONE | {"observedGeneration": 1}, "Waiting", "has not seen the change yet"),
        (2, PAUSE, DONE, "Done", "1 of 1"),
        # Changed again, elsewhere: the pause still stands.
        (3, PAUSE | {"replicas": 3}, DONE, "Done", "1 of 1"),
        (3, PAUSE | {"replicas": 3}, DONE | {"observedGeneration": 2}, "Done", "1 of 1"),
        # Changed again, and against us.
        (3, patches.execution("Running"), DONE, "Failed", "spec.execution.state is Running now"),
        (2, PAUSE, degraded("UnusableSpec", "nothing can be done"), "Failed", "nothing can be done"),
        (2, PAUSE, degraded("UnusableSpec", "of an older spec", generation=1), "Waiting", ""),
        (2, PAUSE, degraded("EngineFailing", "comes back by itself"), "Waiting", "comes back by itself"),
        (2, PAUSE, degraded("NotImplemented", "not done yet: spec.execution (x)"), "Failed", "spec.execution"),
        (2, PAUSE, degraded("NotImplemented", "not done yet: spec.weights.verify (x)"), "Waiting", ""),
        (2, PAUSE, degraded("NotImplemented", "not done yet: spec.execution.stateless (x)"), "Waiting", ""),
    ],
)
def test_asked(generation: int, spec: Object, status: Object, expected: str, said: str) -> None:
    goal = Asked(2, PAUSE, goals.execution("Paused"))

    state, message = state_of(goal, fleet(generation, status, **spec))

    assert state == expected
    assert said in message


values = st.none() | st.integers() | st.text(max_size=3)
objects = st.recursive(
    st.dictionaries(st.sampled_from("abc"), values, max_size=3),
    lambda below: st.dictionaries(st.sampled_from("abc"), values | below, max_size=3),
    max_leaves=6,
)


@given(objects, objects)
def test_a_spec_has_what_was_merged_into_it(spec: Object, patch: Object) -> None:
    assert patches.difference(merged(spec, patch), patch) == ""


@given(objects, objects)
def test_a_difference_names_a_field_that_differs(spec: Object, patch: Object) -> None:
    found = patches.difference(spec, patch)
    if not found:
        return
    value: Any = spec
    wanted: Any = patch
    for key in found.split(" is ")[0].split(".")[1:]:
        value, wanted = (value or {}).get(key) if isinstance(value, dict) else None, wanted[key]
    assert value != wanted
