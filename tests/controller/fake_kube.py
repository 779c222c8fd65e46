"""An API server in memory, with the rules that the controller relies on: resourceVersions, conflicts, UIDs, 410."""

from __future__ import annotations

import asyncio
import copy
import itertools
import uuid
from collections.abc import AsyncGenerator, Callable

from sglang_rollout.controller.kinds import Kind, Object
from sglang_rollout.controller.kube import KubeClient
from sglang_rollout.controller.kube_errors import Conflict, Gone, KubeError, NotFound

Place = tuple[str, str, str]


class FakeKube(KubeClient):
    """calls: what was done, in order: (verb, plural or plural/subresource, name).

    fail: set to raise an error from a call, by looking at (verb, plural, name).
    """

    def __init__(self) -> None:
        self.objects: dict[Place, Object] = {}
        self.calls: list[tuple[str, str, str]] = []
        self.fail: Callable[[str, str, str], KubeError | None] = lambda *_: None
        self.delay = 0.0
        self._versions = itertools.count(100)
        self._changes: list[tuple[int, str, Place, Object]] = []
        self._changed = asyncio.Event()
        self._compacted = 0
        self.tokens = 0

    async def close(self) -> None:
        pass

    def put(self, kind: Kind, value: Object) -> Object:
        """As another client would: creates or replaces, and tells the watches."""
        metadata = value["metadata"]
        place = (kind.plural, metadata.get("namespace", ""), metadata["name"])
        before = self.objects.get(place)
        stored = copy.deepcopy(value)
        stored["metadata"]["uid"] = metadata.get("uid") or (before or {}).get("metadata", {}).get("uid") or _uid()
        stored["metadata"].setdefault("creationTimestamp", "2026-01-01T00:00:00Z")
        stored.setdefault("kind", kind.kind)
        stored.setdefault("apiVersion", kind.api_version)
        self._store(place, stored, "MODIFIED" if before else "ADDED")
        return copy.deepcopy(stored)

    def remove(self, kind: Kind, namespace: str, name: str, *, silently: bool = False) -> None:
        """silently: the watch never tells, as when it lost its place meanwhile."""
        place = (kind.plural, namespace, name)
        value = self.objects.pop(place)
        if not silently:
            self._tell("DELETED", place, value)

    def compact(self) -> None:
        """Watches from before now are told that their place is lost."""
        self._compacted = next(self._versions)
        self._changed.set()

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Object:
        await self._begin("get", kind.plural, name)
        try:
            return copy.deepcopy(self.objects[kind.plural, namespace or "", name])
        except KeyError:
            raise NotFound(f"{kind.plural} {name}", 404) from None

    async def get_path(self, path: str) -> Object:
        await self._begin("get", path, "")
        return {"issuer": "https://issuer", "keys": [{"kid": "one"}]}

    async def list(
        self, kind: Kind, namespace: str | None = None, labels: str = "", fields: str = ""
    ) -> tuple[list[Object], str]:
        await self._begin("list", kind.plural, "")
        found = [
            copy.deepcopy(value)
            for (plural, place, _), value in self.objects.items()
            if plural == kind.plural and namespace in (None, place)
        ]
        return found, str(next(self._versions))

    async def watch(
        self,
        kind: Kind,
        namespace: str | None,
        since: str,
        labels: str = "",
        fields: str = "",
        seconds: float = 300.0,
    ) -> AsyncGenerator[tuple[str, Object]]:
        await self._begin("watch", kind.plural, "")
        told = int(since)
        while True:
            if told < self._compacted:
                raise Gone("too old", 410)
            for version, change, (plural, place, _), value in list(self._changes):
                if version > told and plural == kind.plural and namespace in (None, place):
                    told = version
                    yield change, copy.deepcopy(value)
            self._changed.clear()
            await self._changed.wait()

    async def apply(
        self, kind: Kind, manifest: Object, manager: str, subresource: str | None = None, *, strict: bool = True
    ) -> Object:
        metadata = manifest["metadata"]
        plural = f"{kind.plural}/{subresource}" if subresource else kind.plural
        await self._begin("apply", plural, metadata["name"])
        place = (kind.plural, metadata.get("namespace", ""), metadata["name"])
        before = self.objects.get(place)
        if subresource and before is None:
            raise NotFound(metadata["name"], 404)
        self._check(before, metadata)
        new: Object = copy.deepcopy(before) if before else {"metadata": {"uid": _uid()}}
        if subresource:
            new[subresource] = copy.deepcopy(manifest[subresource])
        else:
            spec_changed = before is None or before.get("spec") != manifest.get("spec")
            generation = int(new["metadata"].get("generation", 0)) + (1 if spec_changed else 0)
            kept = {name: new["metadata"][name] for name in ("uid", "resourceVersion") if name in new["metadata"]}
            new.update(copy.deepcopy(manifest))
            new["metadata"] = {**new["metadata"], **kept}
            if "spec" in manifest:
                new["metadata"]["generation"] = generation
        if new != before:
            self._store(place, new, "MODIFIED" if before else "ADDED")
        return copy.deepcopy(self.objects[place])

    async def create(
        self, kind: Kind, value: Object, subresource: str | None = None, name: str | None = None
    ) -> Object:
        await self._begin("create", f"{kind.plural}/{subresource}" if subresource else kind.plural, name or "")
        if subresource == "token":
            self.tokens += 1
            return {"spec": value["spec"], "status": {"token": f"token-{self.tokens}"}}
        metadata = value["metadata"]
        if (kind.plural, metadata["namespace"], metadata["name"]) in self.objects:
            raise Conflict("already there", 409)
        return self.put(kind, value)

    async def replace(self, kind: Kind, value: Object, seconds: float = 10.0) -> Object:
        metadata = value["metadata"]
        await self._begin("replace", kind.plural, metadata["name"])
        before = self.objects.get((kind.plural, metadata["namespace"], metadata["name"]))
        if before is None:
            raise NotFound(metadata["name"], 404)
        self._check(before, metadata)
        return self.put(kind, value)

    async def merge(self, kind: Kind, namespace: str, name: str, patch: Object) -> Object:
        await self._begin("merge", kind.plural, name)
        value = await self.get(kind, namespace, name)
        return self.put(kind, {**value, **patch})

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        await self._begin("delete", kind.plural, name)
        found = self.objects.get((kind.plural, namespace, name))
        if found is None:
            raise NotFound(name, 404)
        self._check(found, {"uid": uid})
        self.remove(kind, namespace, name)

    async def _begin(self, verb: str, plural: str, name: str) -> None:
        await asyncio.sleep(self.delay)
        self.calls.append((verb, plural, name))
        error = self.fail(verb, plural, name)
        if error is not None:
            raise error

    @staticmethod
    def _check(before: Object | None, metadata: Object) -> None:
        for name in ("resourceVersion", "uid"):
            if name in metadata and (before is None or before["metadata"].get(name) != metadata[name]):
                raise Conflict(f"{name} is another", 409)

    def _store(self, place: Place, value: Object, change: str) -> None:
        self.objects[place] = value
        self._tell(change, place, value)

    def _tell(self, change: str, place: Place, value: Object) -> None:
        version = next(self._versions)
        value["metadata"]["resourceVersion"] = str(version)
        self._changes.append((version, change, place, copy.deepcopy(value)))
        self._changed.set()


def _uid() -> str:
    return str(uuid.uuid4())


async def eventually(condition: Callable[[], object], seconds: float = 5.0) -> None:
    """Returns as soon as the condition holds; fails the test when it does not in time."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 what it waits for has no event
            await asyncio.sleep(0.005)
