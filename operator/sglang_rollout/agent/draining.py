"""Letting an engine's requests end before its pod does: waited for, and aborted when that takes too long."""

from __future__ import annotations

from dataclasses import dataclass

from .sglang import Load

LINGER_SECONDS = 1.0  # a request that was on its way when the last router was told still arrives


@dataclass
class Draining:
    """seconds: how long requests may take to end. Times are the monotonic clock's."""

    seconds: float
    since: float | None = None
    idle_since: float | None = None
    swept: bool = False

    def begin(self, now: float) -> None:
        if self.since is None:
            self.since = now

    def look(self, load: Load, held: bool, now: float) -> bool:
        """True if what is left is to be aborted now. `held`: a pause holds it, so it would wait for ever and its
        clients had better hear of it now than at the cut."""
        self.begin(now)
        if held and not self.swept:
            self.swept = True
            return True
        # Under a pause the counts stand still, and nothing comes to the scheduler after the abort.
        if held or not load.requests:
            self.idle_since = now if self.idle_since is None else self.idle_since
            return False
        self.idle_since = None
        return self.overdue(now)

    def overdue(self, now: float) -> bool:
        return self.since is not None and now - self.since > self.seconds

    def done(self, now: float) -> bool:
        return self.idle_since is not None and now - self.idle_since >= LINGER_SECONDS
