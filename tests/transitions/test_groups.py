"""When the pods of an engine are one group, and when they begin anew."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from sglang_rollout.api import EngineStatus
from sglang_rollout.api.conditions import timestamp
from sglang_rollout.api.recovery import RestartPolicy
from sglang_rollout.protocol.report import AgentReport, EngineReport
from sglang_rollout.transitions import groups
from sglang_rollout.transitions.engines import EngineView
from sglang_rollout.transitions.observed import PodView

NOW = datetime(2026, 1, 1, tzinfo=UTC)
POLICY = RestartPolicy(base_delay_seconds=30, max_delay_seconds=100, max_restarts=3, reset_after_seconds=3600)


def engine(record: EngineStatus, *uids: str, nodes: int = 2, start_id: str = "", ready: bool = True) -> EngineView:
    """An engine whose pod of rank i has uid uids[i]; an empty uid: that pod is missing."""
    pods = {
        rank: PodView(f"f-e0-{rank}", uid, 0, rank=rank, ip=f"10.0.0.{rank}", phase="Running", ready=ready)
        for rank, uid in enumerate(uids)
        if uid
    }
    reports = {0: AgentReport(1, "a", uids[0], 0, engine=EngineReport(start_id=start_id))} if start_id else {}
    return EngineView(0, "f-e0", nodes, True, record, pods=pods, reports=reports)


def record(
    *uids: str, incarnation: int = 1, restarts: int = 0, ago: float | None = None, start: str = ""
) -> EngineStatus:
    restarted_at = None if ago is None else timestamp(NOW - timedelta(seconds=ago))
    return EngineStatus(
        name="f-e0",
        pod_uids=uids,
        incarnation=incarnation,
        restarts=restarts,
        restarted_at=restarted_at,
        start_id=start,
    )


def test_a_group_begins_only_when_every_pod_is_there() -> None:
    assert not groups.advance(engine(record(incarnation=0), "a", ""), POLICY, NOW).whole
    begun = groups.advance(engine(record(incarnation=0), "a", "b"), POLICY, NOW)
    assert (begun.incarnation, begun.pod_uids) == (1, ("a", "b"))
    assert begun.assignment is not None
    assert (begun.assignment.rank0_pod_uid, begun.assignment.rank0_pod_ip) == ("a", "10.0.0.0")


@pytest.mark.parametrize("present", [("", "b"), ("new", "b"), ("a", ""), ("a", "new")])
def test_the_survivors_of_a_broken_group_go_together(present: tuple[str, str]) -> None:
    state = groups.advance(engine(record("a", "b"), *present), POLICY, NOW)
    assert {pod.uid for pod in state.deletes} == {"a", "b"} & set(present)
    assert not state.whole
    assert (state.restarts, state.incarnation) == (1, 1)


def test_pods_that_are_all_new_are_the_next_incarnation() -> None:
    state = groups.advance(engine(record("a", "b", incarnation=4), "c", "d"), POLICY, NOW)
    assert (state.incarnation, state.pod_uids, state.whole) == (5, ("c", "d"), True)


def test_an_engine_that_starts_again_in_place_is_a_new_incarnation() -> None:
    same = groups.advance(engine(record("a", "b", start="s1"), "a", "b", start_id="s1"), POLICY, NOW)
    again = groups.advance(engine(record("a", "b", start="s1"), "a", "b", start_id="s2"), POLICY, NOW)
    first = groups.advance(engine(record("a", "b"), "a", "b", start_id="s1"), POLICY, NOW)
    assert [same.incarnation, again.incarnation, first.incarnation] == [1, 2, 1]


@pytest.mark.parametrize(("restarts", "delay"), [(0, 0), (1, 30), (2, 60), (3, 100), (50, 100), (100000, 100)])
def test_the_wait_doubles_up_to_its_maximum(restarts: int, delay: int) -> None:
    assert groups.restart_delay(restarts, POLICY) == timedelta(seconds=delay)


@pytest.mark.parametrize(
    ("restarts", "ago", "deletes", "exhausted"),
    [
        (1, 29, False, False),
        (1, 31, True, False),
        (2, 31, False, False),
        (2, 61, True, False),
        (3, 3000, False, True),
        (1, -86400, True, False),  # written by a clock that was a day ahead
    ],
)
def test_restarts_are_spaced_and_counted(restarts: int, ago: float, deletes: bool, exhausted: bool) -> None:
    state = groups.advance(engine(record("a", "b", restarts=restarts, ago=ago), "a", ""), POLICY, NOW)
    assert bool(state.deletes) == deletes
    assert state.exhausted == exhausted


def test_one_delete_order_is_one_restart_even_without_a_delay() -> None:
    eager = RestartPolicy(base_delay_seconds=0, max_delay_seconds=0, max_restarts=3)
    first = groups.advance(engine(record("a", "b"), "a", ""), eager, NOW)
    seen_again = record("a", "b", restarts=first.restarts, ago=0)
    second = groups.advance(engine(seen_again, "a", ""), eager, NOW)
    assert (first.restarts, second.restarts, second.deletes) == (1, 1, ())


def test_an_engine_that_was_well_long_enough_counts_anew() -> None:
    old = record("a", "b", restarts=3, ago=4000)
    assert groups.advance(engine(old, "a", "b"), POLICY, NOW).restarts == 0
    assert groups.advance(engine(old, "a", "b", ready=False), POLICY, NOW).restarts == 3


def test_policy_none_leaves_the_survivors() -> None:
    state = groups.advance(engine(record("a", "b"), "a", ""), RestartPolicy(type="None"), NOW)
    assert state.deletes == ()
    assert "delete them to start anew" in state.message


@pytest.mark.parametrize(
    ("told", "incarnation"),
    [
        ({}, 4),
        ({0: 7}, 8),
        ({0: 7, 1: 0}, 8),
        ({0: 7, 1: 6}, 8),
        ({0: 3, 1: 3}, 4),  # which the status tells of another group
        ({0: 7, 1: 7}, 7),  # they were told, and the status was not written
    ],
)
def test_an_incarnation_is_of_one_group_and_kept_until_status_tells_it(told: dict[int, int], incarnation: int) -> None:
    view = engine(record("x", "y", incarnation=3), "a", "b")
    reports = {rank: AgentReport(1, "a", "ab"[rank], rank, incarnation=number) for rank, number in told.items()}
    state = groups.advance(EngineView(0, "f-e0", 2, True, view.record, pods=view.pods, reports=reports), POLICY, NOW)
    assert state.incarnation == incarnation
