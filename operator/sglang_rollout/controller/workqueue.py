"""A work queue with the semantics of client-go's: a key is queued once however often it is added, is never handled
twice at once, and comes back once when it was added meanwhile. Failures back off by key."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Priority(IntEnum):
    """SPEC: somebody changed what they want. STATE: something changed in the cluster, or time has come."""

    SPEC = 0
    STATE = 1


@dataclass
class Backoff:
    """Exponential by failure, with full jitter: seconds = random(0, min(longest, first * 2^(failures-1)))."""

    first: float = 0.05
    longest: float = 60.0
    random: Callable[[], float] = random.random

    def seconds(self, failures: int) -> float:
        ceiling = min(self.longest, self.first * 2.0 ** min(failures - 1, 40))
        return ceiling * self.random()


@dataclass
class QueueState(Generic[K]):
    """The queue without its clock and waiters. Every method takes the time in seconds."""

    backoff: Backoff = field(default_factory=Backoff)
    _ready: dict[Priority, OrderedDict[K, float]] = field(default_factory=lambda: {p: OrderedDict() for p in Priority})
    _processing: set[K] = field(default_factory=set)
    _again: dict[K, tuple[Priority, float]] = field(default_factory=dict)
    _due: dict[K, float] = field(default_factory=dict)
    _heap: list[tuple[float, int, K]] = field(default_factory=list)
    _order: itertools.count[int] = field(default_factory=itertools.count)
    _failures: dict[K, int] = field(default_factory=dict)

    def add(self, key: K, priority: Priority, now: float) -> bool:
        """Whether there is something to pop that was not there before."""
        if key in self._processing:
            before, since = self._again.get(key, (priority, now))
            self._again[key] = (min(before, priority), since)
            return False
        queued = self._ready[Priority.STATE].pop(key, None) if priority is Priority.SPEC else None
        if any(key in ready for ready in self._ready.values()):
            return False
        self._ready[priority][key] = now if queued is None else queued
        return queued is None

    def add_after(self, key: K, delay: float, now: float) -> None:
        """Adds the key once `delay` seconds have passed; of several delays the earliest counts."""
        due = now + max(delay, 0.0)
        if due < self._due.get(key, float("inf")):
            self._due[key] = due
            heapq.heappush(self._heap, (due, next(self._order), key))

    def add_failed(self, key: K, now: float) -> float:
        """Adds the key after its backoff and returns that in seconds."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        delay = self.backoff.seconds(failures)
        self.add_after(key, delay, now)
        return delay

    def forget(self, key: K) -> None:
        """The next failure of the key is its first."""
        self._failures.pop(key, None)

    def pop(self, now: float) -> tuple[K, float] | None:
        """The next key to handle and since when it has waited. A delay that was set before is void then:
        whoever handles the key says anew when it must come back."""
        self._promote(now)
        for ready in self._ready.values():
            if ready:
                key, since = ready.popitem(last=False)
                self._due.pop(key, None)
                self._processing.add(key)
                return key, since
        return None

    def done(self, key: K) -> None:
        self._processing.discard(key)
        again = self._again.pop(key, None)
        if again is not None:
            self.add(key, again[0], again[1])

    def next_due(self) -> float | None:
        """When the next delayed key is due."""
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    @property
    def depth(self) -> int:
        return sum(len(ready) for ready in self._ready.values())

    @property
    def processing(self) -> int:
        return len(self._processing)

    def _promote(self, now: float) -> None:
        while (due := self.next_due()) is not None and due <= now:
            _, _, key = heapq.heappop(self._heap)
            del self._due[key]
            self.add(key, Priority.STATE, due)


class WorkQueue(Generic[K]):
    """QueueState on the event loop. Only for use from one loop."""

    def __init__(self, backoff: Backoff | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._state: QueueState[K] = QueueState(backoff or Backoff())
        self._clock = clock
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False

    def add(self, key: K, priority: Priority = Priority.STATE) -> None:
        if not self._closed and self._state.add(key, priority, self._clock()):
            self._wake.set()

    def add_after(self, key: K, delay: float) -> None:
        if not self._closed:
            self._state.add_after(key, delay, self._clock())
            self._wake.set()

    def add_failed(self, key: K) -> float:
        delay = self._state.add_failed(key, self._clock())
        self._wake.set()
        return delay

    def forget(self, key: K) -> None:
        self._state.forget(key)

    async def get(self) -> tuple[K, float] | None:
        """The next key and the seconds that it has waited; None once the queue is closed. Call done() after."""
        while not self._closed:
            now = self._clock()
            item = self._state.pop(now)
            if item is not None:
                self._idle.clear()
                return item[0], max(0.0, now - item[1])
            self._wake.clear()
            due = self._state.next_due()
            try:
                async with asyncio.timeout(None if due is None else max(0.0, due - now)):
                    await self._wake.wait()
            except TimeoutError:
                continue
        return None

    def done(self, key: K) -> None:
        self._state.done(key)
        self._wake.set()
        if self._state.processing == 0:
            self._idle.set()

    def close(self) -> None:
        """Nothing is taken in or given out any more."""
        self._closed = True
        self._wake.set()

    async def drained(self) -> None:
        """Returns when no key is being handled."""
        await self._idle.wait()

    @property
    def depth(self) -> int:
        return self._state.depth
