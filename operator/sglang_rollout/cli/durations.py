"""Durations as Go and kubectl write them: 90s, 5m, 1h30m, or plain seconds."""

from __future__ import annotations

import re

_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|h|m|s)")
MAX_SECONDS = 366 * 86400.0


def parse_duration(text: str) -> float:
    """Seconds. Raises ValueError with what to write instead."""
    if re.fullmatch(r"\d+(\.\d+)?", text):
        seconds = float(text)
    elif text and _PART.sub("", text) == "":
        seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))
    else:
        raise ValueError(f"{text!r} is no duration: write 90s, 5m or 1h30m")
    if not 0 < seconds <= MAX_SECONDS:
        raise ValueError(f"{text!r} must be more than nothing and at most a year")
    return seconds


def duration_text(seconds: float) -> str:
    """Short, for people: 42ms, 2.4s, 12s, 3m20s, 5h, 3d4h."""
    if 0 < seconds < 0.9995:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 10:
        return f"{seconds:.1f}s".replace(".0s", "s")
    whole = int(seconds)
    for name, size, below, part in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size}{name}" + (f"{rest}{below}" if rest else "")
    return f"{whole}s"
