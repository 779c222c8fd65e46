"""Builders of status: conditions that keep their transition time, a bounded history of versions."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_rollout.api import Condition, ConditionType, WeightsStatus, find_condition, with_condition
from sglang_rollout.api.conditions import MESSAGE_MAX, parse_timestamp, timestamp
from sglang_rollout.api.status import HISTORY_MAX

START = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC)
LATER = START + timedelta(minutes=1)


def ready(
    conditions: tuple[Condition, ...], status: bool | None, now: datetime, reason: str = "Because"
) -> tuple[Condition, ...]:
    return with_condition(conditions, ConditionType.READY, status, reason, "A sentence.", generation=3, now=now)


@pytest.mark.parametrize(
    ("before", "after", "changed_at"),
    [(True, True, START), (False, False, START), (True, False, LATER), (False, True, LATER), (None, True, LATER)],
)
def test_transition_time_moves_with_the_status_alone(before: bool | None, after: bool, changed_at: datetime) -> None:
    conditions = ready(ready((), before, START), after, LATER, reason="Other")

    assert len(conditions) == 1
    assert conditions[0].last_transition_time == timestamp(changed_at)
    assert conditions[0].reason == "Other"


def test_conditions_keep_their_places() -> None:
    conditions = ready((), True, START)
    conditions = with_condition(conditions, ConditionType.PAUSED, False, "Running", "It runs.", generation=1, now=START)

    changed = ready(conditions, False, LATER)

    assert [condition.type for condition in changed] == ["Ready", "Paused"]
    assert find_condition(changed, ConditionType.PAUSED) == conditions[1]
    assert find_condition(changed, ConditionType.DEGRADED) is None


def test_unknown_and_generation() -> None:
    condition = ready((), None, START)[0]

    assert (condition.status, condition.observed_generation) == ("Unknown", 3)


def test_long_messages_are_cut() -> None:
    conditions = with_condition((), "Ready", False, "Failed", "x" * 99999, generation=1, now=START)

    assert len(conditions[0].message) == MESSAGE_MAX
    assert conditions[0].message.endswith("…")


def test_timestamps_are_whole_utc_seconds() -> None:
    elsewhere = START.astimezone(timezone(timedelta(hours=5)))

    assert timestamp(elsewhere) == "2026-01-02T03:04:05Z"
    assert parse_timestamp(timestamp(elsewhere)) == START.replace(microsecond=0)


def test_lag_counts_committed_versions() -> None:
    weights = WeightsStatus()
    for version in ("1", "2", "3"):
        weights = weights.with_committed(version, f"/models/{version}", START)

    assert [weights.lag(version) for version in ("3", "2", "1", "0")] == [0, 1, 2, None]


def test_committing_the_newest_again_changes_nothing() -> None:
    weights = WeightsStatus().with_committed("1", "/models/1", START)

    assert weights.with_committed("1", "/models/1", LATER) == weights


def test_going_back_makes_an_old_version_the_newest() -> None:
    weights = WeightsStatus()
    for version in ("1", "2", "1"):
        weights = weights.with_committed(version, f"/models/{version}", START)

    assert [entry.version for entry in weights.history] == ["2", "1"]


@given(st.lists(st.sampled_from([str(number) for number in range(60)]), max_size=100))
def test_history_is_bounded_unique_and_newest_last(versions: list[str]) -> None:
    weights = WeightsStatus()
    for version in versions:
        weights = weights.with_committed(version, "", START)

    kept = [entry.version for entry in weights.history]
    assert len(kept) == len(set(kept)) <= HISTORY_MAX
    assert kept[-1:] == versions[-1:]
