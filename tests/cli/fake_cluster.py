"""An API server in memory: one fleet, what is asked of it, and the answers that a test scripts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

from click.testing import CliRunner, Result

from sglang_rollout.cli.cluster import Cluster, Deadline
from sglang_rollout.cli.connection import Connection
from sglang_rollout.cli.exits import Failure, NotFound
from sglang_rollout.cli.invocation import Surroundings
from sglang_rollout.cli.verbs import sgrollout
from tests.api.objects import Object, merged, rollout

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
CONDITION_TIME = "2026-01-02T03:00:00Z"


def condition(kind: str, status: bool, reason: str = "Because", message: str = "", generation: int = 1) -> Object:
    return {
        "type": kind,
        "status": "True" if status else "False",
        "observedGeneration": generation,
        "lastTransitionTime": CONDITION_TIME,
        "reason": reason,
        "message": message,
    }


def engine(index: int, **fields: Any) -> Object:
    return {"name": f"fleet-e{index}", "ready": True, "routable": True, **fields}


def fleet(generation: int = 1, status: Object | None = None, **spec: Any) -> Object:
    """A fleet whose status is of its present generation, unless it says otherwise."""
    value = rollout(**spec)
    value["metadata"] |= {"generation": generation, "resourceVersion": "1", "creationTimestamp": CONDITION_TIME}
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

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds

    def deadline(self, seconds: float) -> Deadline:
        return Deadline(seconds, self.now)


def call(connection: FakeConnection, *words: str) -> Result:
    """The plug-in, in this process, over a fake."""
    surroundings = Surroundings(connect=lambda *_: Cluster(connection, sleep=lambda _: None), now=lambda: NOW)
    return CliRunner().invoke(sgrollout, list(words), obj=surroundings)


def not_found() -> NotFound:
    return NotFound('sglangrollouts.rollout.sglang.io "fleet" not found')
