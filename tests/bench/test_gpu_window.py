"""What an event costs the streams of the GPU benchmark: counted from token to token, at the rate around it."""

from __future__ import annotations

import pytest

from bench.gpu.streams import AFTER, BEFORE, LEAD, RESUMED, window
from bench.gpu.table import table

STEP = 0.01
STREAMS = 4


def stamps(stopped: float, seconds: float) -> list[float]:
    """Steps of STREAMS tokens each, none within `seconds` from `stopped`."""
    count = round((BEFORE + LEAD + AFTER + seconds) / STEP)
    moments = [-BEFORE - LEAD + number * STEP for number in range(count)]
    return [moment for moment in moments if not stopped < moment < stopped + seconds for _ in range(STREAMS)]


def test_without_an_event_nothing_is_lost() -> None:
    seen = window(stamps(10.0, 0.0), 0.0, 0.0)
    assert seen.lost == pytest.approx(0.0, abs=STEP / 2)
    assert seen.gap == pytest.approx(STEP)
    assert seen.rate == pytest.approx(STREAMS / STEP, rel=0.02)


@pytest.mark.parametrize("seconds", [0.03, 0.2, 0.5])
def test_a_stop_is_lost_whole(seconds: float) -> None:
    assert seconds < RESUMED
    seen = window(stamps(0.0, seconds), 0.0, seconds)
    assert seen.lost == pytest.approx(seconds, abs=STEP * 1.5)
    assert seen.gap == pytest.approx(seconds, abs=STEP * 1.5)


def test_streams_that_stand_still_cannot_be_judged_by() -> None:
    with pytest.raises(ValueError, match="did not decode"):
        window([-0.1] * STREAMS, 0.0, 0.1)


def test_a_line_for_each_kind_of_event() -> None:
    row = {"name": "n", "mode": "retract", "gap": 0.1, "gigabytes_per_second": 2.0, "verified": "sums equal"}
    lines = table([{**row, "stall": 0.03, "lost": 0.02}, {**row, "stall": 0.05, "lost": 0.04}]).splitlines()
    assert lines[-1] == "| n | retract | 2 | 40.0 (30.0 to 50.0) | 100 | 30 (20 to 40) | 2 | sums equal |"
