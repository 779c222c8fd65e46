"""The measurements as a Markdown table."""

from __future__ import annotations

from statistics import median
from typing import Any


def table(rows: list[dict[str, Any]]) -> str:
    """One line for each kind of event and pause: medians, with the range of the stall."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["name"], row["mode"]), []).append(row)
    lines = [
        "| what | pause | pause to continue, ms (range) | longest token gap, ms | decode lost, ms | GB/s | verified |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (name, mode), held in groups.items():
        stalls = [row["stall"] * 1e3 for row in held]
        speed = median(row["gigabytes_per_second"] for row in held)
        lines.append(
            f"| {name} | {mode} | {median(stalls):.1f} ({min(stalls):.1f} to {max(stalls):.1f}) | "
            f"{median(row['gap'] for row in held) * 1e3:.0f} | {median(row['lost'] for row in held) * 1e3:.0f} | "
            f"{f'{speed:.0f}' if speed else ''} | {', '.join(sorted({row['verified'] for row in held}))} |"
        )
    return "\n".join(lines) + "\n"
