"""Keeps a local copy of the objects of one kind by list and watch, and tells of every change. After the watch has
lost its place, a new list replaces the copy, so that what vanished meanwhile is told as deleted too."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic, TypeVar

from .kinds import Kind, Object, object_key, resource_version
from .kube import KubeClient
from .kube_errors import Gone, KubeError

log = logging.getLogger(__name__)
V = TypeVar("V")

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 30.0
WATCH_SECONDS = (300.0, 600.0)  # drawn for each watch, so that they do not all end at once

ObjectKey = tuple[str, str]
GroupKey = tuple[str, str]


@dataclass(frozen=True)
class Entry(Generic[V]):
    """One object of the copy. group: what it belongs to, for Store.group()."""

    key: ObjectKey
    uid: str
    version: int
    group: GroupKey
    value: V


class Store(Generic[V]):
    """The copy: by key, and grouped. changes: how many it has seen."""

    def __init__(self) -> None:
        self.changes = 0
        self._entries: dict[ObjectKey, Entry[V]] = {}
        self._groups: dict[GroupKey, dict[ObjectKey, Entry[V]]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: ObjectKey) -> Entry[V] | None:
        return self._entries.get(key)

    def group(self, group: GroupKey) -> Mapping[ObjectKey, Entry[V]]:
        return self._groups.get(group, {})

    def keys(self) -> set[ObjectKey]:
        return set(self._entries)

    def put(self, entry: Entry[V]) -> Entry[V] | None:
        """Returns what was there before."""
        before = self.remove(entry.key)
        self._entries[entry.key] = entry
        self._groups.setdefault(entry.group, {})[entry.key] = entry
        return before

    def remove(self, key: ObjectKey) -> Entry[V] | None:
        before = self._entries.pop(key, None)
        self.changes += 1
        if before is not None:
            members = self._groups[before.group]
            del members[key]
            if not members:
                del self._groups[before.group]
        return before


class Informer(Generic[V]):
    """Fills a store from one namespace (None: all) and calls `on_change(group)` for what each change belongs to.

    project: the part of an object that is kept; None: the object is of no interest.
    group_of: what it belongs to.
    watch_seconds: bounds of how long one watch lasts.
    """

    def __init__(
        self,
        kube: KubeClient,
        kind: Kind,
        namespace: str | None,
        store: Store[V],
        *,
        project: Callable[[Object], V | None],
        group_of: Callable[[Object], GroupKey | None],
        on_change: Callable[[GroupKey], None],
        labels: str = "",
        fields: str = "",
        watch_seconds: tuple[float, float] = WATCH_SECONDS,
    ) -> None:
        self.kind = kind
        self.namespace = namespace
        self.synced = asyncio.Event()
        self.heard = time.monotonic()  # when the server was last heard of, bookmarks included
        self.stirred = time.monotonic()  # when run() last did anything, failures included
        self._kube = kube
        self._store = store
        self._project = project
        self._group_of = group_of
        self._on_change = on_change
        self._labels = labels
        self._fields = fields
        self._watch_seconds = watch_seconds

    async def run(self) -> None:
        """For ever; ends by cancellation only."""
        since = ""
        pause = FIRST_PAUSE
        while True:
            self.stirred = time.monotonic()
            try:
                if not since:
                    since = await self._replace()
                    self.synced.set()
                    pause = FIRST_PAUSE
                seconds = random.uniform(*self._watch_seconds)  # noqa: S311 spreads load
                changes = self._kube.watch(self.kind, self.namespace, since, self._labels, self._fields, seconds)
                async with aclosing(changes):
                    async for change, value in changes:
                        self.heard = self.stirred = time.monotonic()
                        pause = FIRST_PAUSE
                        since = value["metadata"].get("resourceVersion") or since
                        self._take(change, value)
                self.heard = time.monotonic()  # the server ended it in good order
                continue
            except Gone:
                log.info("%s: the watch has lost its place; listing again", self)
                since = ""
            except KubeError as error:
                log.warning("%s: %s; again in at most %.1f s", self, error, pause)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 jitter
            pause = min(pause * 2, LONGEST_PAUSE)

    async def _replace(self) -> str:
        items, version = await self._kube.list(self.kind, self.namespace, self._labels, self._fields)
        self.heard = time.monotonic()
        listed = {object_key(item): item for item in items}
        for key in self._store.keys() - listed.keys():
            if self.namespace in (None, key[0]):
                self._changed(self._store.remove(key))
        for item in listed.values():
            self._keep(item)
        return version

    def _take(self, change: str, value: Object) -> None:
        if change == "DELETED":
            self._changed(self._store.remove(object_key(value)))
        elif change in ("ADDED", "MODIFIED"):
            self._keep(value)

    def _keep(self, value: Object) -> None:
        group = self._group_of(value)
        projected = self._project(value) if group is not None else None
        if group is None or projected is None:
            self._changed(self._store.remove(object_key(value)))
            return
        entry = Entry(object_key(value), value["metadata"].get("uid", ""), resource_version(value), group, projected)
        before = self._store.put(entry)
        if before is not None and before.group != group:
            self._on_change(before.group)
        if before is None or before.uid != entry.uid or before.value != projected:
            self._on_change(group)

    def _changed(self, entry: Entry[V] | None) -> None:
        if entry is not None:
            self._on_change(entry.group)

    def __str__(self) -> str:
        return f"{self.kind.plural} of {self.namespace or 'all namespaces'}"
