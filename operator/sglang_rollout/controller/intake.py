"""Where every version of a resource comes in, from the watch, the periodic list or an own write, and what follows."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from .kinds import ROLLOUT, Object, object_key, resource_version
from .kube import KubeClient
from .kube_errors import KubeError, NotFound
from .metrics import Metrics
from .rollouts import FleetKey, Rollouts, must_not_go_back
from .spec_timing import SpecTiming
from .workqueue import Priority, WorkQueue

log = logging.getLogger(__name__)

WATCH_LATENESS_SECONDS = 5.0  # a change that the watch tells within so long is not missed
RETRY_SECONDS = 2.0
SPREAD_SECONDS = 30.0


@dataclass
class Intake:
    """namespaces: empty: all. missed_in_a_row: periodic lists that found a change which the watch had not told."""

    kube: KubeClient
    namespaces: Iterable[str]
    rollouts: Rollouts
    queue: WorkQueue[FleetKey]
    metrics: Metrics
    timing: SpecTiming
    clock: Callable[[], float] = time.monotonic
    missed_in_a_row: int = 0
    _spec_received: dict[FleetKey, float] = field(default_factory=dict)

    def take(self, value: Object) -> None:
        """A version of a resource."""
        change = self.rollouts.put(value)
        if change is None:
            return
        key, status = object_key(value), value.get("status") or {}
        self.timing.changed(key, change)
        self.timing.status(key, status)
        self.metrics.fleet_status(*key, status)
        if change.of_spec:
            self._spec_received.setdefault(key, self.clock())
            self.queue.forget(key)  # a new wish does not wait for the backoff of an old one
            self.queue.add(key, Priority.SPEC)
        elif change.before is not None and change.before.object.get("status") != value.get("status"):
            self.queue.add(key)

    def take_event(self, kind: str | None, value: Object) -> None:
        """An event of the watch."""
        if kind != "DELETED":
            self.take(value)
            return
        self._gone(object_key(value), value["metadata"].get("uid"))

    def begun(self, key: FleetKey) -> None:
        """A pass over this fleet begins."""
        received = self._spec_received.pop(key, None)
        if received is not None:
            self.metrics.event_to_reconcile.observe(self.clock() - received)

    async def first_list(self) -> None:
        """Returns when all resources are known; until the API server answers it tries again."""
        while True:
            try:
                await self._list(lateness=0.0)
            except NotFound:
                log.warning("the API server does not know %s yet: is the CRD installed?", ROLLOUT.api_version)
            except KubeError as error:
                log.warning("the resources cannot be listed: %s", error)
            else:
                return
            await asyncio.sleep(RETRY_SECONDS)

    async def resync(self, every: float) -> None:
        """For ever: lists all resources and looks at every fleet again, spread over time. What the watch had lost is
        repaired by it, and counted: the watch should lose nothing."""
        while True:
            await asyncio.sleep(every * random.uniform(0.8, 1.2))  # noqa: S311 jitter
            try:
                missed = await self._list(WATCH_LATENESS_SECONDS)
            except KubeError as error:
                log.warning("the resources cannot be listed again: %s", error)
                continue
            self.missed_in_a_row = self.missed_in_a_row + 1 if missed else 0
            for key in self.rollouts.known():
                self.queue.add_after(key, random.uniform(0.0, min(SPREAD_SECONDS, every / 4)))  # noqa: S311 jitter

    async def _list(self, lateness: float) -> int:
        """How many changes nobody had told of `lateness` seconds after they were listed. Raises KubeError, WentBack."""
        missed = 0
        for namespace in tuple(self.namespaces) or (None,):
            before = {key: self.rollouts.get(key) for key in self.rollouts.known()}
            items, version = await self.kube.list(ROLLOUT, namespace)
            for item in items:
                must_not_go_back(before.get(object_key(item)), item)
            await asyncio.sleep(lateness)
            listed = {object_key(item): item for item in items}
            for item in items:
                known = self.rollouts.get(object_key(item))
                if known is None or resource_version(known.object) < resource_version(item):
                    missed += 1
                    self.take(item)
            for key in self.rollouts.known():
                known = self.rollouts.get(key)
                if key in listed or known is None or namespace not in (None, key[0]):
                    continue
                if resource_version(known.object) <= int(version or 0):
                    missed += 1
                    self._gone(key, known.uid)
        if lateness:
            self.metrics.resync_missed.inc(missed)
        return missed

    def _gone(self, key: FleetKey, uid: str | None) -> None:
        if self.rollouts.remove(key, uid):
            self.timing.forget(key)
            self.metrics.forget_fleet(*key)
            self._spec_received.pop(key, None)
            self.queue.add(key, Priority.SPEC)
