"""Kubernetes events on the resource: written in the background, equal ones counted in a series instead of repeated."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from ..api.group import API_VERSION, KIND
from ..transitions.planned import EventNote
from .kinds import EVENT, Object
from .kube import KubeClient
from .kube_errors import KubeError, NotFound

log = logging.getLogger(__name__)

CONTROLLER = "rollout.sglang.io/operator"
NOTE_MAX = 1024  # of events.k8s.io/v1
SERIES_SECONDS = 360.0  # equal events within so long of each other are one series
SERIES_WRITE_SECONDS = 30.0  # and the series is written no more often
REMEMBERED = 4096
QUEUE_MAX = 1000


@dataclass
class _Series:
    name: str
    count: int
    seen: float
    written: float


_Identity = tuple[str, str, str, str]


class EventRecorder:
    """record() never waits and never fails; run() writes. What cannot be written is logged and dropped: events are
    told to people, nothing depends on them."""

    def __init__(
        self,
        kube: KubeClient,
        instance: str,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._kube = kube
        self._instance = instance
        self._clock = clock
        self._now = now
        self._series: OrderedDict[_Identity, _Series] = OrderedDict()
        self._pending: asyncio.Queue[tuple[Object | None, str, str, Object]] = asyncio.Queue(QUEUE_MAX)

    def record(self, rollout: Object, note: EventNote) -> None:
        """An event on this resource (its raw object)."""
        metadata = rollout["metadata"]
        identity = (metadata["uid"], note.type, note.reason, note.message)
        namespace = metadata["namespace"]
        clock = self._clock()
        series = self._series.get(identity)
        if series is None or clock - series.seen > SERIES_SECONDS:
            name = f"{metadata['name']}.{uuid.uuid4().hex[:16]}"
            self._series[identity] = _Series(name, 1, clock, clock)
            self._put(self._event(metadata, note, name), namespace, name, {})
        else:
            series.count, series.seen = series.count + 1, clock
            if clock - series.written >= SERIES_WRITE_SECONDS or series.count == 2:
                series.written = clock
                patch = {"series": {"count": series.count, "lastObservedTime": self._timestamp()}}
                self._put(None, namespace, series.name, patch)
        self._series.move_to_end(identity)
        while len(self._series) > REMEMBERED:
            self._series.popitem(last=False)

    async def run(self) -> None:
        """Writes for ever."""
        while True:
            order = await self._pending.get()
            try:
                await self._write(*order)
            finally:
                self._pending.task_done()

    async def flush(self) -> None:
        """Returns when everything recorded so far has been written; run() must be running."""
        await self._pending.join()

    async def _write(self, event: Object | None, namespace: str, name: str, patch: Object) -> None:
        try:
            if event is not None:
                await self._kube.create(EVENT, event)
            else:
                await self._kube.merge(EVENT, namespace, name, patch)
        except NotFound:
            pass  # the event has expired, or its namespace is gone
        except KubeError as error:
            log.warning("event %s/%s was not written: %s", namespace, name, error)

    def _put(self, event: Object | None, namespace: str, name: str, patch: Object) -> None:
        try:
            self._pending.put_nowait((event, namespace, name, patch))
        except asyncio.QueueFull:
            log.warning("event %s/%s was dropped: too many wait to be written", namespace, name)

    def _event(self, metadata: Object, note: EventNote, name: str) -> Object:
        return {
            "apiVersion": EVENT.api_version,
            "kind": EVENT.kind,
            "metadata": {"name": name, "namespace": metadata["namespace"]},
            "eventTime": self._timestamp(),
            "reportingController": CONTROLLER,
            "reportingInstance": self._instance[:128],
            "action": "Reconcile",
            "reason": note.reason[:128],
            "note": note.message if len(note.message) <= NOTE_MAX else note.message[: NOTE_MAX - 1] + "…",
            "type": note.type,
            "regarding": {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "namespace": metadata["namespace"],
                "name": metadata["name"],
                "uid": metadata["uid"],
            },
        }

    def _timestamp(self) -> str:
        return self._now().astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
