"""Server-side apply of a fleet's children: only when something is to be changed, never onto somebody else's object."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..api import names
from .caches import Caches
from .kinds import BY_NAME, resource_version
from .kube import KubeClient
from .kube_errors import NotFound, Refused
from .projections import child as child_of
from .projections import drift_mark

ECHO_SECONDS = 10.0  # for so long a cache that does not show our own write yet is taken to be late
REFUSED_SECONDS = 10.0  # a manifest that was refused is not tried again sooner

ChildKey = tuple[str, str, str]
"""(namespace, kind, name)."""


class ForeignObject(Exception):
    """The name is taken by an object of another owner."""


@dataclass(frozen=True)
class _Applied:
    """Our last apply of a child: what, and how the object looked after it. echoed: the cache has shown it since, so
    that a child which the cache does not have is gone, not late."""

    hash: str
    drift: str
    version: int
    at: float
    echoed: bool = False


@dataclass(frozen=True)
class _Failed:
    hash: str
    message: str
    until: float


def manifest_hash(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


def child_key(manifest: Mapping[str, Any]) -> ChildKey:
    metadata = manifest["metadata"]
    return metadata["namespace"], manifest["kind"], metadata["name"]


class Applier:
    """Remembers what this process has applied; after a restart each child is applied once more, which changes nothing
    when nothing differs."""

    def __init__(self, kube: KubeClient, caches: Caches, clock: Callable[[], float] = time.monotonic) -> None:
        self._kube = kube
        self._caches = caches
        self._clock = clock
        self._applied: dict[ChildKey, _Applied] = {}
        self._failed: dict[ChildKey, _Failed] = {}

    def is_due(self, manifest: Mapping[str, Any]) -> bool:
        """Whether apply() would call the API server."""
        key, digest = child_key(manifest), manifest_hash(manifest)
        failed = self._failed.get(key)
        if failed is not None and failed.hash == digest and self._clock() < failed.until:
            return False
        applied = self._applied.get(key)
        if applied is None or applied.hash != digest:
            return True
        namespace, kind, name = key
        entry = self._caches.children[kind].get((namespace, name))
        if entry is None and applied.echoed:
            return True
        if entry is None or entry.version < applied.version:
            return self._clock() - applied.at >= ECHO_SECONDS
        self._applied[key] = replace(applied, echoed=True)
        return entry.value.applied_hash != digest or entry.value.drift != applied.drift

    async def apply(self, manifest: Mapping[str, Any], owner_uid: str) -> None:
        """Raises KubeError and ForeignObject."""
        key, digest = child_key(manifest), manifest_hash(manifest)
        kind = BY_NAME[key[1]]
        try:
            uid = await self._own_uid(key, owner_uid)
            metadata = dict(manifest["metadata"])
            metadata["annotations"] = {**metadata.get("annotations", {}), names.ANNOTATION_APPLIED_HASH: digest}
            if uid:
                metadata["uid"] = uid  # another object of this name by now: the API server answers a conflict
            live = await self._kube.apply(kind, {**manifest, "metadata": metadata}, names.FIELD_MANAGER)
        except (Refused, ForeignObject) as error:
            self._failed[key] = _Failed(digest, str(error), self._clock() + REFUSED_SECONDS)
            raise
        self._failed.pop(key, None)
        self._applied[key] = _Applied(digest, drift_mark(live), resource_version(live), self._clock())

    def errors(self, namespace: str, wanted: set[ChildKey]) -> dict[tuple[str, str], str]:
        """By (kind, name): why those of the wanted children that were refused were so."""
        return {
            (kind, name): self._failed[place, kind, name].message
            for place, kind, name in wanted
            if place == namespace and (place, kind, name) in self._failed
        }

    def retry_after(self, wanted: set[ChildKey]) -> float | None:
        """Seconds until the first that was refused, or that the cache has not shown, is due again."""
        waits = [self._failed[key].until for key in wanted if key in self._failed]
        waits += [
            applied.at + ECHO_SECONDS
            for key in wanted
            if (applied := self._applied.get(key)) is not None and not applied.echoed
        ]
        return max(0.0, min(waits) - self._clock()) if waits else None

    def forget(self, wanted: set[ChildKey]) -> None:
        for key in wanted:
            self._applied.pop(key, None)
            self._failed.pop(key, None)

    async def _own_uid(self, key: ChildKey, owner_uid: str) -> str:
        """The UID of the child that is there; empty when there is none. The cache does not know objects without our
        labels, so one that it does not have is looked for. Raises ForeignObject."""
        namespace, kind_name, name = key
        found = self._caches.child(kind_name, namespace, name)
        if found is None:
            try:
                found = child_of(await self._kube.get(BY_NAME[kind_name], namespace, name))
            except NotFound:
                return ""
        if found.view.owner_uid != owner_uid:
            raise ForeignObject(f"{kind_name} {name} belongs to another owner: delete or rename it")
        return found.view.uid
