"""What fault points do with their words: each acts once, also over a restart of the agent."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sglang_rollout.agent.fault_points import ENV_FAULTS, FaultPoints


def test_nothing_is_wanted_without_the_variable() -> None:
    points = FaultPoints.read({})
    points.at_once("apply:begun")
    assert (points.wanted, points.file) == ({}, None)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="apply:begun=explode"):
        FaultPoints.read({ENV_FAULTS: "apply:begun=explode"})


async def test_a_word_acts_at_its_turn_and_once() -> None:
    points = FaultPoints.read({ENV_FAULTS: "pause:before=hang:2"})
    await points.at("pause:before")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(points.at("pause:before"), 0.05)
    await points.at("pause:before")


async def test_words_in_a_file_come_later_and_are_taken_out_before_they_act(tmp_path: Path) -> None:
    file = tmp_path / "faults"
    points = FaultPoints.read({ENV_FAULTS: f"@{file}"})
    await points.at("apply:begun")
    file.write_text("apply:begun=hang\n")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(points.at("apply:begun"), 0.05)
    await FaultPoints.read({ENV_FAULTS: f"@{file}"}).at("apply:begun")


async def test_a_hold_lasts_until_its_word_is_taken_out(tmp_path: Path) -> None:
    file = tmp_path / "faults"
    file.write_text("pause:after=hold")
    points = FaultPoints.read({ENV_FAULTS: f"@{file}"})
    held = asyncio.create_task(points.at("pause:after"))
    await asyncio.sleep(0.12)
    assert not held.done()
    assert (tmp_path / "faults.held").read_text() == "pause:after"
    file.write_text("")
    await asyncio.wait_for(held, 1)
    assert not (tmp_path / "faults.held").exists()
