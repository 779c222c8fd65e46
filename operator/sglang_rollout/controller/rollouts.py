"""The resources as last seen, newest version only: from the watch, from own writes and from the periodic list."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..api import SGLangRollout
from .kinds import Object, object_key, resource_version

FleetKey = tuple[str, str]

GARBAGE_COLLECTION = frozenset({"foregroundDeletion", "orphan"})
"""Finalizers under which Kubernetes deletes the children first, or takes their owner from them."""


@dataclass(frozen=True)
class Rollout:
    """One resource. `model` is parsed on first use and raises pydantic.ValidationError when it cannot be."""

    object: Object

    @cached_property
    def model(self) -> SGLangRollout:
        return SGLangRollout.from_object(self.object)

    @cached_property
    def status(self) -> Object:
        """As it would be written again. Raises as `model` does."""
        return self.model.status.to_object()

    @property
    def uid(self) -> str:
        return str(self.object["metadata"].get("uid", ""))

    @property
    def generation(self) -> int:
        return int(self.object["metadata"].get("generation") or 0)

    @property
    def deleting(self) -> bool:
        """Whether its children go now, or are let go. While a finalizer of somebody else alone holds it they stay, and
        are looked after: none may be left in the middle of a move."""
        metadata = self.object["metadata"]
        held_by = set(metadata.get("finalizers") or [])
        return "deletionTimestamp" in metadata and (not held_by or not held_by.isdisjoint(GARBAGE_COLLECTION))


@dataclass(frozen=True)
class Change:
    """A new version and the one before it, if it is still the same object."""

    before: Rollout | None
    after: Rollout

    @property
    def of_spec(self) -> bool:
        """Somebody wants something else, or the resource is new or being deleted."""
        before, after = self.before, self.after
        return before is None or before.generation != after.generation or before.deleting != after.deleting


class WentBack(Exception):
    """The API server answers with an older state than it has shown before: a backup was restored. All that caches and
    watches know is of a future that is gone."""


def must_not_go_back(before: Rollout | None, read: Object) -> None:
    """before: what was known when the reading of `read` began. Raises WentBack."""
    if before is not None and resource_version(read) < resource_version(before.object):
        place = "/".join(object_key(read))
        raise WentBack(f"{place} is older than it was before: a backup of the cluster was restored")


class Rollouts:
    """By (namespace, name). A version older than the known one is ignored: the watch may lag behind own writes."""

    def __init__(self) -> None:
        self._known: dict[FleetKey, Rollout] = {}

    def get(self, key: FleetKey) -> Rollout | None:
        return self._known.get(key)

    def known(self) -> list[FleetKey]:
        return list(self._known)

    def put(self, value: Object) -> Change | None:
        """None: not newer than what is known."""
        key = object_key(value)
        before, new = self._known.get(key), Rollout(value)
        if before is None or before.uid != new.uid:
            if before is not None and resource_version(value) < resource_version(before.object):
                return None
            self._known[key] = new
            return Change(None, new)
        if resource_version(value) <= resource_version(before.object):
            return None
        self._known[key] = new
        return Change(before, new)

    def remove(self, key: FleetKey, uid: str | None = None) -> bool:
        """With `uid`: only if it is still that one."""
        known = self._known.get(key)
        if known is None or (uid is not None and known.uid != uid):
            return False
        del self._known[key]
        return True
