"""Durations on the command line and in tables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_rollout.cli.durations import MAX_SECONDS, duration_text, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("5m", 300), ("1h30m", 5400), ("1.5h", 5400), ("500ms", 0.5), ("1m1s", 61), ("0.2", 0.2)],
)
def test_reads(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0s", "-1", "-5m", "5x", "m", "1h 30m", "1e3", "inf", "nan", "99999999h"])
def test_refuses_with_what_to_write(text: str) -> None:
    with pytest.raises(ValueError, match=r"write 90s, 5m or 1h30m|at most a year"):
        parse_duration(text)


@given(st.text(max_size=12))
def test_reads_or_refuses_anything(text: str) -> None:
    try:
        seconds = parse_duration(text)
    except ValueError:
        return
    assert 0 < seconds <= MAX_SECONDS


@given(st.integers(0, 999), st.integers(0, 59), st.integers(0, 59))
def test_reads_hours_minutes_seconds(hours: int, minutes: int, seconds: int) -> None:
    expected = hours * 3600 + minutes * 60 + seconds
    if expected:
        assert parse_duration(f"{hours}h{minutes}m{seconds}s") == expected


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.042, "42ms"),
        (2.42, "2.4s"),
        (9.97, "10s"),
        (12.9, "12s"),
        (60, "1m"),
        (200, "3m20s"),
        (18000, "5h"),
        (273600, "3d4h"),
    ],
)
def test_writes_short(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@given(st.floats(0, 1e8))
def test_what_is_written_is_nearly_what_was_meant(seconds: float) -> None:
    text = duration_text(seconds)
    days, _, rest = text.rpartition("d")
    read = (int(days) * 86400 if days else 0) + (parse_duration(rest) if rest.strip("0.ms") else 0)
    assert read == pytest.approx(seconds, rel=0.05, abs=1)
