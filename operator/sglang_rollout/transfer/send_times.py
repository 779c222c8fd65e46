"""What the time of a sending went into: whoever finds one long asks this first."""

from __future__ import annotations

from collections.abc import Callable


class SendTimes:
    """clock: in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begun = clock()
        self._at: dict[str, float] = {}
        self.packing = 0.0  # seconds for all buckets, while others travelled

    def mark(self, name: str) -> None:
        """That this is so now; what is so again and again is told by the last time."""
        self._at[name] = self.seconds

    @property
    def seconds(self) -> float:
        return self._clock() - self._begun

    def words(self) -> str:
        """In milliseconds since the first agent came."""
        parts = [f"{name} at {seconds * 1e3:.1f}" for name, seconds in self._at.items()]
        return ", ".join([*parts, f"packed for {self.packing * 1e3:.1f} ms"])
