"""How long the fleet took to become what its spec asks for, by the part of the spec that was changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .kinds import Object
from .rollouts import Change, FleetKey

NAMED = ("execution", "weights", "memory", "replicas", "restart")


@dataclass(frozen=True)
class _Pending:
    generation: int
    what: str
    since: float


class SpecTiming:
    """A change counts as in effect when Ready is true for its generation. Of several changes before that, the newest
    one is timed: nobody asks for the others any more."""

    def __init__(self, observe: Callable[[str, float], None], clock: Callable[[], float]) -> None:
        self._observe = observe
        self._clock = clock
        self._pending: dict[FleetKey, _Pending] = {}

    def changed(self, key: FleetKey, change: Change) -> None:
        if change.before is None or change.before.generation == change.after.generation:
            return
        before, after = change.before.object.get("spec") or {}, change.after.object.get("spec") or {}
        what = next((name for name in NAMED if before.get(name) != after.get(name)), "other")
        self._pending[key] = _Pending(change.after.generation, what, self._clock())

    def status(self, key: FleetKey, status: Object) -> None:
        pending = self._pending.get(key)
        if pending is None:
            return
        for condition in status.get("conditions") or []:
            if (
                condition["type"] == "Ready"
                and condition["status"] == "True"
                and condition.get("observedGeneration", 0) >= pending.generation
            ):
                self._observe(pending.what, self._clock() - pending.since)
                del self._pending[key]

    def forget(self, key: FleetKey) -> None:
        self._pending.pop(key, None)
