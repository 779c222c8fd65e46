"""Which orders are over: those of a lower lease term than this pod has seen, also after a restart, and those that
arrive after a later one of the same term."""

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
        self._serial = 0

    @property
    def highest(self) -> int:
        return self._highest

    def accept(self, term: int, serial: int = 0) -> None:
        """Remembers `term`, in its file before it returns. Raises Superseded if a higher one was seen, or a higher
        `serial` of the same term since this process began: no connection of before can bring an order. Serial 0 is
        that of an operator which does not count."""
        if term < self._highest:
            raise Superseded(f"lease term {term} is over: this pod has obeyed term {self._highest}")
        if term > self._highest:
            write_private(self._path, str(term).encode())
            self._highest, self._serial = term, 0
        if serial and serial < self._serial:
            raise Superseded(f"order {serial} of term {term} comes late: this pod has obeyed order {self._serial}")
        self._serial = max(serial, self._serial)
