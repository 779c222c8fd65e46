"""An API server in memory: one fleet, what is asked of it, and the answers that a test scripts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from sglang_rollout.kube_access.connection import Connection
from sglang_rollout.kube_access.failures import Failure, NotFound
from tests.api.objects import Object, merged, rollout

CREATED = "2026-01-02T03:00:00Z"


def fleet(generation: int = 1, status: Object | None = None, **spec: Any) -> Object:
    """A fleet whose status is of its present generation, unless it says otherwise."""
    value = rollout(**spec)
    value["metadata"] |= {"generation": generation, "resourceVersion": "1", "creationTimestamp": CREATED}
    return value | {"status": {"observedGeneration": generation, **(status or {})}}


class FakeConnection(Connection):
    """answers: what is read or watched, in turn: a fleet, or a failure to raise; the last one stays. changes: what the
    watch sends after each read. listings: of pods, in turn, then `pods`; logs: by pod."""

    def __init__(self, *answers: Object | Failure, changes: Iterable[Object | Failure] = ()) -> None:
        super().__init__(None, "default")
        self.answers = list(answers)
        self.changes = list(changes)
        self.pods: list[Object] = []
        self.listings: list[list[Object] | Failure] = []
        self.logs: dict[str, list[str] | Failure] = {}
        self.patches: list[Object] = []
        self.queries: list[dict[str, str]] = []

    def call(self, method: str, path: str, body: Object | None = None, **query: str) -> Object:
        if path.endswith("/pods"):
            found = self.listings.pop(0) if self.listings else self.pods
            if isinstance(found, Failure):
                raise found
            return {"items": found}
        if method == "PATCH":
            assert body is not None
            self.patches.append(body)
            self.queries.append(query)
            before = self._answer()
            changed = merged(before, body)
            changed["metadata"]["generation"] += 1
            return changed
        if path.endswith("/sglangrollouts"):
            return {"items": self.answers}
        return self._answer()

    def lines(self, path: str, silence: float | None, **query: str) -> Iterator[str]:
        if path.endswith("/log"):
            found = self.logs[path.split("/")[-2]]
            if isinstance(found, Failure):
                raise found
            self.queries.append(query)
            yield from found
            return
        while self.changes:
            change = self.changes.pop(0)
            if isinstance(change, Failure):
                raise change
            yield json.dumps({"type": "MODIFIED", "object": change} if "type" not in change else change)

    def _answer(self) -> Object:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Failure):
            raise answer
        return answer


class Clock:
    """A monotonic clock that only sleeping moves."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds

    def left_of(self, seconds: float) -> Callable[[], float]:
        """From the clock's beginning."""
        return lambda: max(0.0, seconds - self.seconds)


def not_found() -> NotFound:
    return NotFound('sglangrollouts.rollout.sglang.io "fleet" not found')
