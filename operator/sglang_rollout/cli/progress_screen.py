"""Progress while a verb waits: a bar that moves in a terminal, a line for each change elsewhere. On stderr."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

from .goals import Progress as GoalProgress


class ProgressScreen:
    """`with ProgressScreen(console, "pause fleet") as screen:`; the bar is gone afterwards."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._said = ""
        self._bar = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
            console=console,
            transient=True,
            expand=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(escape(title), total=None)

    def __enter__(self) -> ProgressScreen:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, progress: GoalProgress) -> None:
        """How far it is."""
        self._bar.update(
            self._task, description=escape(progress.message), completed=progress.done, total=progress.of or None
        )
        counted = f" ({progress.done}/{progress.of})" if progress.of else ""
        self._line(f"{self._title}{counted}: {progress.message}")

    def tell(self, text: str) -> None:
        """Something beside the progress: trouble on the way."""
        if self._console.is_terminal:
            self._bar.update(self._task, description=escape(text))
        else:
            self._line(f"{self._title}: {text}")

    def _line(self, text: str) -> None:
        if not self._console.is_terminal and text != self._said:
            self._said = text
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
