"""What is kept of pods and children, and when a difference is worth a write."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from sglang_rollout.controller.kinds import Object
from sglang_rollout.controller.projections import child, drift_mark, pod_view
from sglang_rollout.controller.status_writes import QUIET_SECONDS, STILL_SECONDS, is_quiet, may_wait
from tests.controller import fleets

POD: Object = {
    "metadata": {
        "name": "f-e2-1",
        "namespace": "ns",
        "uid": "u",
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "labels": {"rollout.sglang.io/engine": "2", "apps.kubernetes.io/pod-index": "1"},
        "annotations": {"rollout.sglang.io/spec-hash": "abc"},
    },
    "spec": {"nodeName": "n1"},
    "status": {
        "phase": "Running",
        "podIP": "10.0.0.9",
        "conditions": [{"type": "Ready", "status": "True"}, {"type": "PodScheduled", "status": "True"}],
        "initContainerStatuses": [
            {"name": "agent", "state": {"running": {}}, "ready": True, "started": True, "restartCount": 0}
        ],
        "containerStatuses": [
            {
                "name": "engine",
                "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
                "lastState": {"terminated": {"exitCode": 1, "reason": "Error", "message": "unknown flag"}},
                "ready": False,
                "started": False,
                "restartCount": 3,
            }
        ],
    },
}


def test_a_pod_as_the_planner_sees_it() -> None:
    view = pod_view(POD)
    assert view is not None
    assert (view.engine, view.rank, view.ip, view.node, view.spec_hash) == (2, 1, "10.0.0.9", "n1", "abc")
    assert view.ready
    assert view.alive
    agent, engine = view.containers
    assert agent.running
    assert (engine.waiting, engine.exit_code, engine.exit_message, engine.restarts) == (
        "CrashLoopBackOff",
        1,
        "unknown flag",
        3,
    )


def test_a_bare_pod_is_understood() -> None:
    view = pod_view({"metadata": {"name": "p", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}})
    assert view is not None
    assert (view.engine, view.phase, view.ready, view.containers) == (None, "Pending", False, ())


def test_a_pod_that_finds_no_room_says_why() -> None:
    value = copy.deepcopy(POD)
    value["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes"}]
    view = pod_view(value)
    assert view is not None
    assert view.unschedulable == "0/3 nodes"
    assert not view.ready


def test_labels_that_are_not_numbers_are_not_ours() -> None:
    value = copy.deepcopy(POD)
    value["metadata"]["labels"]["rollout.sglang.io/engine"] = "two"
    assert pod_view(value) is None


@pytest.mark.parametrize(
    ("change", "drifts"),
    [
        ({"resourceVersion": "9"}, False),
        ({"generation": 5}, True),
        ({"labels": {}}, True),
        ({"ownerReferences": []}, True),
        ({"annotations": {"deployment.kubernetes.io/revision": "2"}}, False),
        ({"annotations": {"rollout.sglang.io/spec-hash": "x"}}, True),
    ],
)
def test_drift_is_what_an_apply_would_undo(change: Any, drifts: bool) -> None:
    value = fleets.stateful_set()
    value["metadata"] |= {"uid": "u", "generation": 4, "resourceVersion": "8"}
    changed = {**value, "metadata": {**value["metadata"], **change}}
    assert (drift_mark(changed) != drift_mark(value)) is drifts


def test_kinds_without_a_generation_are_told_by_their_version() -> None:
    value = fleets.config_map()
    value["metadata"] |= {"resourceVersion": "8"}
    changed = {**value, "metadata": {**value["metadata"], "resourceVersion": "9"}}
    assert drift_mark(changed) != drift_mark(value)


def test_a_deployment_that_cannot_make_pods_says_why() -> None:
    value = fleets.stateful_set()
    value["metadata"]["uid"] = "u"
    value["status"] = {"conditions": [{"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"}]}
    assert child({**value, "kind": "Deployment"}).view.failure == "exceeded quota"


BASE = {
    "observedGeneration": 1,
    "readyReplicas": 1,
    "conditions": [{"type": "Ready", "status": "False", "reason": "Waiting", "message": "1 of 4"}],
    "engines": [{"name": "f-e0", "incarnation": 1, "routable": False, "message": ""}],
    "weights": {"phase": "Staging", "transaction": {"id": "t", "prepared": 1}},
}


@pytest.mark.parametrize(
    ("path", "value", "quiet"),
    [
        (("readyReplicas",), 2, True),
        (("conditions", 0, "message"), "2 of 4", True),
        (("conditions", 0, "status"), "True", False),
        (("conditions", 0, "reason"), "Paused", False),
        (("engines", 0, "routable"), True, True),
        (("engines", 0, "incarnation"), 2, False),
        (("engines", 0, "podUIDs"), ["u"], False),
        (("weights", "transaction", "prepared"), 2, True),
        (("weights", "transaction", "decision"), "Commit", False),
        (("weights", "phase"), "Committing", False),
        (("observedGeneration",), 2, False),
    ],
)
def test_only_counts_and_messages_can_wait(path: tuple[Any, ...], value: Any, quiet: bool) -> None:
    after: Any = copy.deepcopy(BASE)
    inner = after
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    assert is_quiet(BASE, after) is quiet


AT_BARRIER: dict[str, Any] = {
    **BASE,
    "executionState": "Running",
    "weights": {
        "phase": "Committing",
        "version": "1",
        "targetVersion": "2",
        "history": [{"version": "1"}],
        "transaction": {"id": "t", "decision": "Commit", "committed": 0},
    },
}


@pytest.mark.parametrize(
    ("changes", "quiet"),
    [
        ({"conditions": [{"type": "Paused", "status": "True", "reason": "Paused", "message": ""}]}, True),
        ({"weights": {"phase": "Verifying", "version": "2", "history": [{"version": "1"}, {"version": "2"}]}}, True),
        ({"weights": {"phase": "Idle"}}, False),
        ({"weights": {"transaction": {"id": "u", "decision": "Commit", "committed": 0}}}, False),
        ({"weights": {"targetVersion": "3"}}, False),
        ({"engines": [{"name": "f-e0", "incarnation": 2}]}, False),
        ({"observedGeneration": 2}, False),
    ],
)
def test_while_engines_stand_still_no_status_is_written_that_can_be_worked_out_anew(
    changes: dict[str, Any], quiet: bool
) -> None:
    weights = {**AT_BARRIER["weights"], **changes.get("weights", {})}
    assert is_quiet(AT_BARRIER, {**AT_BARRIER, **changes, "weights": weights}) is quiet


def test_at_barriers_a_status_waits_longer_and_what_is_loud_never() -> None:
    counted = {**BASE, "readyReplicas": 2}
    assert may_wait(BASE, counted) == QUIET_SECONDS
    assert may_wait(BASE, {**BASE, "observedGeneration": 2}) == 0.0
    assert may_wait(AT_BARRIER, {**AT_BARRIER, "readyReplicas": 2}) == STILL_SECONDS
    assert may_wait(AT_BARRIER, {**AT_BARRIER, "weights": {**AT_BARRIER["weights"], "phase": "Idle"}}) == 0.0
