"""Moves that one engine makes alone: how they are named, so that one that ended is ordered anew."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from sglang_rollout.api import EngineStatus, WeightsStatus
from sglang_rollout.protocol.report import AgentReport, EngineReport, MoveReport
from sglang_rollout.transitions.engines import EngineView
from sglang_rollout.transitions.sources import Keepers
from sglang_rollout.transitions.weight_steps import RETRY_SECONDS, catch_up

from .simulation import Simulation

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SPEC = Simulation().rollout.spec


def engine(move: MoveReport | None = None, void: str = "") -> EngineView:
    report = AgentReport(1, "a", "p", 0, engine=EngineReport(start_id="s1", weights_void=void), move=move)
    return EngineView(0, "f-e0", 1, True, EngineStatus(name="f-e0"), reports={0: report})


def ordered(view: EngineView, version: str, now: datetime = NOW) -> str:
    weights = WeightsStatus().with_committed(version, "/models/x", NOW)
    move = catch_up(SPEC, view, Keepers([view]), weights, now)
    assert move is not None
    return move.id


@pytest.mark.parametrize("version", ["2", "a#b", "#1", "x:y#3", "%23"])
def test_a_move_that_was_given_up_is_ordered_anew_from_time_to_time_whatever_its_label(version: str) -> None:
    first = ordered(engine(), version)
    assert ordered(engine(MoveReport(first)), version) == first
    ended = MoveReport(first, aborted=True)
    second = ordered(engine(ended), version)
    assert second != first
    assert ordered(engine(MoveReport(second)), version, NOW + timedelta(seconds=RETRY_SECONDS)) == second
    refused = replace(ended, id=second, aborted=False, error="tensor x is missing")
    assert ordered(engine(refused), version, NOW + timedelta(seconds=RETRY_SECONDS)) not in (first, second)


def test_no_two_reasons_to_catch_up_have_one_name() -> None:
    cases = [("a", ""), ("a:b", ""), ("a", "b"), ("a#b", ""), ("a", "#b"), ("a%23b", ""), ("a:b", "c"), ("a", "b:c")]
    assert len({ordered(engine(void=void), version) for version, void in cases}) == len(cases)
