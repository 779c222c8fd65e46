"""What was measured: rows of one table, from the single values to median and extremes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.markup import escape
from rich.table import Table

COLUMNS = ("what", "n", "median", "p99", "min", "max", "unit", "goal")
P99_NEEDS = 100  # fewer values have no 99th percentile but their maximum


@dataclass(frozen=True)
class Row:
    """values: as measured, in `unit`. goal: in words; it is shown, and nothing fails by it."""

    what: str
    values: Sequence[float]
    unit: str
    goal: str = ""

    def cells(self) -> tuple[str, ...]:
        """One cell for each of COLUMNS."""
        if not self.values:
            return (self.what, "0", "-", "-", "-", "-", self.unit, self.goal)
        many = len(self.values) >= P99_NEEDS
        return (
            self.what,
            str(len(self.values)),
            number(percentile(self.values, 50)),
            number(percentile(self.values, 99)) if many else "-",
            number(min(self.values)),
            number(max(self.values)),
            self.unit,
            self.goal,
        )


@dataclass
class Section:
    """One table, with the command that makes it and what a reader must know of how it was made."""

    name: str
    title: str
    command: str
    notes: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def add(self, what: str, values: Sequence[float], unit: str, goal: str = "") -> None:
        self.rows.append(Row(what, values, unit, goal))

    def table(self) -> Table:
        """For the terminal."""
        table = Table(title=escape(self.title), title_justify="left")
        for column in COLUMNS:
            table.add_column(column, justify="left" if column in ("what", "unit", "goal") else "right")
        for row in self.rows:
            table.add_row(*(escape(cell) for cell in row.cells()))
        return table

    def markdown(self) -> str:
        """The same, with the notes, for docs/performance.md."""
        lines = [f"### {self.title}", "", f"`{self.command}`", ""]
        lines += [f"- {note}" for note in self.notes]
        lines += ["", _line(COLUMNS), _line(["---"] + ["---:"] * 5 + ["---"] * 2)]
        lines += [_line(row.cells()) for row in self.rows]
        return "\n".join(lines)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of 100 values do not exceed (nearest rank); 50 is the median, of an
    even number of values the mean of the middle two."""
    ordered = sorted(values)
    if percent == 50 and len(ordered) % 2 == 0:
        middle = len(ordered) // 2
        return (ordered[middle - 1] + ordered[middle]) / 2
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def number(value: float) -> str:
    """Three digits that count, more before the point."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 4)}f}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
