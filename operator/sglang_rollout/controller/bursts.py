"""Reports of a large fleet come in bursts: its engines answer at one time, and a plan for each handful of them would
delay the one that counts. So reports that come just now are read first, for as long as a few plans take at most."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from .rollouts import FleetKey

LONGEST_SECONDS = 0.25
LONGEST_PLANS = 4.0  # in times that a plan takes
QUIET_PLANS = 0.1  # a burst of which nothing came for so long is over, in times that a plan takes
QUIET_TURNS = 3  # of the event loop: it takes as many from an answer's arrival to its being read


@dataclass
class Bursts:
    """news: grows with every report of the fleet."""

    news: Callable[[FleetKey], int]
    clock: Callable[[], float]
    _plan_seconds: dict[FleetKey, float] = field(default_factory=dict)
    _planned_news: dict[FleetKey, int] = field(default_factory=dict)

    async def over(self, key: FleetKey) -> None:
        """Returns at once where nothing has come since the last plan."""
        plan_seconds = self._plan_seconds.get(key, 0.0)
        until = self.clock() + min(LONGEST_PLANS * plan_seconds, LONGEST_SECONDS)
        pauses = (*[0.0] * QUIET_TURNS, QUIET_PLANS * plan_seconds)
        heard, quiet = self.news(key), 0
        if heard == self._planned_news.get(key, 0):
            return
        while quiet < len(pauses) and self.clock() < until:
            await asyncio.sleep(pauses[quiet])
            before, heard = heard, self.news(key)
            quiet = quiet + 1 if heard == before else 0

    def planned(self, key: FleetKey, news: int, seconds: float) -> None:
        """news: of what was planned from; seconds: that the plan took."""
        self._planned_news[key], self._plan_seconds[key] = news, seconds

    def forget(self, key: FleetKey) -> None:
        self._planned_news.pop(key, None)
        self._plan_seconds.pop(key, None)
