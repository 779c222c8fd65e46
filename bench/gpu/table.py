"""The measurements as a Markdown table."""

from __future__ import annotations

from statistics import median
from typing import Any


def table(rows: list[dict[str, Any]]) -> str:
    """One line for each kind of event and pause: medians, with the range of the stall and of what was lost."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["name"], row["mode"]), []).append(row)
    lines = [
        "| what | pause | n | pause to continue, ms | longest token gap, ms | decode lost, ms | GB/s | verified |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for (name, mode), held in groups.items():
        speed = median(row["gigabytes_per_second"] for row in held)
        cells = (
            name,
            mode,
            str(len(held)),
            _middle([row["stall"] for row in held], 1),
            f"{median(row['gap'] for row in held) * 1e3:.0f}",
            _middle([row["lost"] for row in held], 0),
            f"{speed:.0f}" if speed else "",
            ", ".join(sorted({row["verified"] for row in held})),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _middle(seconds: list[float], digits: int) -> str:
    milliseconds = [value * 1e3 for value in seconds]
    return f"{median(milliseconds):.{digits}f} ({min(milliseconds):.{digits}f} to {max(milliseconds):.{digits}f})"
