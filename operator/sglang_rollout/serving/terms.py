"""The highest lease term that this pod has seen: a deposed operator's orders are refused, also after a restart."""

from __future__ import annotations

from pathlib import Path

from .errors import Superseded
from .private_file import write_private


class LeaseTerms:
    """Keeps the highest term in a file. One that is there but unreadable is an error, not term 0."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._highest = int(path.read_text())
        except FileNotFoundError:
            self._highest = 0

    @property
    def highest(self) -> int:
        return self._highest

    def accept(self, term: int) -> None:
        """Remembers `term`, on disk before it returns. Raises Superseded if a higher one was seen."""
        if term < self._highest:
            raise Superseded(f"lease term {term} is over: this pod has obeyed term {self._highest}")
        if term > self._highest:
            write_private(self._path, str(term).encode())
            self._highest = term
