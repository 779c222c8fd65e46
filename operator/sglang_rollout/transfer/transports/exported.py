"""GPU memory of this process that others have open: which bucket lies in which piece of it. Needs no torch.

It is only freed when every agent has closed it: so it outlives the groups it was exported for, and is used again."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Protocol

from . import TransportBroken

ROUND = 2 << 20  # what cuMemAlloc rounds up to


class Driver(Protocol):
    """What CudaDriver does of it."""

    def allocate(self, size: int) -> int: ...
    def free(self, address: int) -> None: ...
    def export(self, address: int) -> str: ...


class Exported:
    """One allocation. handle: by which other processes open it."""

    def __init__(self, driver: Driver, size: int) -> None:
        """Raises CudaError."""
        self._driver = driver
        self.size = -(-max(size, 1) // ROUND) * ROUND
        self.address = driver.allocate(self.size)
        self.handle = driver.export(self.address)

    def give_back(self) -> None:
        self._driver.free(self.address)


class ExportPool:
    """Of one GPU: what no bucket needs at present. From any thread."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._idle: list[Exported] = []
        self._lock = threading.Lock()

    def take(self, size: int) -> tuple[Exported, list[Exported]]:
        """Memory of at least `size` bytes; and all that was too small, when there was no other: to be given back when
        every agent has closed it, so that it does not pile up. Raises CudaError."""
        with self._lock:
            fitting = [one for one in self._idle if one.size >= size]
            if fitting:
                chosen = min(fitting, key=lambda one: one.size)
                self._idle.remove(chosen)
                return chosen, []
            made = Exported(self._driver, size)
            too_small, self._idle = self._idle, []
            return made, too_small

    def put(self, several: Iterable[Exported]) -> None:
        with self._lock:
            self._idle.extend(several)


class ExportedBuckets:
    """Of one group, by the buckets' numbers. abort() comes from another thread than the rest."""

    def __init__(self, pool: ExportPool, probe_bytes: int) -> None:
        """probe: small memory for trying whether an agent can read it. Raises CudaError."""
        self._pool = pool
        self._taken: dict[int, Exported] = {}
        self._too_small: dict[int, list[Exported]] = {}
        self._aborted = False
        self._lock = threading.Lock()
        self.probe, unneeded = pool.take(probe_bytes)
        pool.put(unneeded)

    def take(self, number: int, size: int) -> Exported:
        """Raises CudaError, TransportBroken."""
        with self._lock:
            if self._aborted:
                raise TransportBroken("the transfer was broken off")
            self._taken[number], self._too_small[number] = self._pool.take(size)
            return self._taken[number]

    def handles(self, number: int) -> tuple[str, list[str]]:
        """Of the bucket's memory, and of what agents must close when they hear of it. Raises TransportBroken."""
        with self._lock:
            if number not in self._taken:
                raise TransportBroken("the transfer was broken off")
            return self._taken[number].handle, [one.handle for one in self._too_small.get(number, ())]

    def free(self, number: int) -> None:
        """All agents have taken the bucket, and closed what it told them to."""
        with self._lock:
            for one in self._too_small.pop(number, ()):
                one.give_back()
            if number in self._taken:
                self._pool.put([self._taken.pop(number)])

    def abort(self) -> None:
        """An agent that is lost may still read: memory is used again, and what it reads then is nobody's."""
        with self._lock:
            if self._aborted:
                return
            self._aborted = True
            self._pool.put(
                [self.probe, *self._taken.values(), *(one for some in self._too_small.values() for one in some)]
            )
            self._taken.clear()
            self._too_small.clear()
