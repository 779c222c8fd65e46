"""The demo's terminal: one line a step with its time, progress while it runs, what to look at when it fails."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.status import Status
from rich.table import Table

# Without a terminal (CI, a pipe) there is no spinner: progress is told in lines, not more often than this.
TELL_EVERY = 15.0


@dataclass
class Step:
    """One step: its title, what it shows while it runs, and what it says when it is done."""

    title: str
    begun: float
    screen: Screen
    result: str = ""
    _told: float = 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun

    def now(self, text: str) -> None:
        """What is going on; replaces what was shown before."""
        self.screen.progress(self, text)

    def command(self, text: str) -> None:
        """A command that does this step, for the reader to try."""
        self.screen.console.print(f"    [cyan]$ {escape(text)}[/cyan]", highlight=False, soft_wrap=True)

    def show(self, text: str) -> None:
        """Lines that stay."""
        for line in text.splitlines():
            self.screen.console.print(f"    {escape(line)}", highlight=False, soft_wrap=True)


@dataclass
class Screen:
    console: Console = field(default_factory=lambda: Console(stderr=False))
    done: list[tuple[str, float]] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)
    _status: Status | None = None

    @contextmanager
    def step(self, title: str) -> Iterator[Step]:
        """A step of the demo; what it raises is shown as its failure and goes on."""
        step = Step(title, time.monotonic(), self)
        self.console.print(f"[bold]{escape(title)}[/bold]", highlight=False, soft_wrap=True)
        try:
            with self._spinning(step):
                yield step
        except BaseException:
            self.console.print(f"  [red]✗ failed after {step.seconds:.1f} s[/red]", highlight=False, soft_wrap=True)
            raise
        seconds = step.seconds
        self.done.append((title, seconds))
        result = f"  {escape(step.result)}" if step.result else ""
        self.console.print(f"  [green]✓ {seconds:.1f} s[/green]{result}", highlight=False, soft_wrap=True)

    @contextmanager
    def _spinning(self, step: Step) -> Iterator[None]:
        if not self.console.is_terminal:
            yield
            return
        with self.console.status("") as status:
            self._status = status
            try:
                yield
            finally:
                self._status = None

    def progress(self, step: Step, text: str) -> None:
        line = f"{text} ({step.seconds:.0f} s)"
        if self._status is not None:
            self._status.update(escape(line))
        elif time.monotonic() - max(step._told, step.begun) >= TELL_EVERY:
            step._told = time.monotonic()
            self.console.print(f"    ... {escape(line)}", highlight=False, soft_wrap=True)

    def summary(self) -> None:
        """All steps with their times."""
        table = Table(box=None, pad_edge=False)
        table.add_column("step")
        table.add_column("seconds", justify="right")
        for title, seconds in self.done:
            table.add_row(escape(title), f"{seconds:.1f}")
        table.add_row("[bold]all[/bold]", f"[bold]{time.monotonic() - self.begun:.1f}[/bold]")
        self.console.print(table)

    def failure(self, error: str, account: str) -> None:
        """What went wrong, and what the cluster says about it."""
        self.console.print(Panel(escape(error), title="what failed", border_style="red"))
        if account:
            self.console.print(escape(account), highlight=False, soft_wrap=True)
