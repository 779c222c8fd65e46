"""What all one-shot requests have in common: when one begins, who is waited for and how long, and when it is over.

A request is recorded in status as Running before any engine is told, so it is done once whoever leads. On a new
resource a request that is already there counts as done: a resource made anew from Git must not repeat it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Generic, TypeVar

from ..api.conditions import seconds_left, timestamp
from ..api.status import RequestStatus, WeightCheckStatus
from ..protocol.operations import Operation, OperationReport, OperationResult
from .engines import EngineView
from .planned import EventNote

DEADLINE_SECONDS = 600.0
ABSENT_SECONDS = 60.0  # that an engine which is not up is waited for
COUNTS_AS_DONE = "was there when the resource was made: counts as done"
EXTERNAL = "control is External: the trainer asks the engines for this by itself"

Status = TypeVar("Status", RequestStatus, WeightCheckStatus)


@dataclass(frozen=True)
class Advance(Generic[Status]):
    """One kind of request. asked: by engine index. resetting: engines whose weights are about to be overwritten: they
    leave the routers first, and are told only when no router has them."""

    status: Status | None
    asked: Mapping[int, Operation] = field(default_factory=dict)
    resetting: frozenset[int] = frozenset()
    events: tuple[EventNote, ...] = ()
    wake: float | None = None


def begin(status: Status, new_resource: bool, now: datetime) -> Status:
    """`status` of a request that was seen for the first time."""
    started = {"result": "Running", "started_at": timestamp(now)}
    done = {"result": None, "completion_time": timestamp(now), "message": COUNTS_AS_DONE}
    return status.model_copy(update={**started, **(done if new_resource else {})})


@dataclass(frozen=True)
class Answers:
    """What the engines have said of one operation until now. started_at: of the request, as status has it."""

    members: Collection[EngineView]
    operation: Operation
    started_at: str | None
    now: datetime

    @cached_property
    def up(self) -> list[EngineView]:
        return [engine for engine in self.members if engine.serving]

    @cached_property
    def begun(self) -> Mapping[int, OperationReport]:
        """By engine index."""
        found = {}
        for engine in self.up:
            for report in engine.leader.operations if engine.leader else ():
                if report.id == self.operation.id:
                    found[engine.index] = report
        return found

    @cached_property
    def ended(self) -> Mapping[int, OperationReport]:
        return {i: report for i, report in self.begun.items() if report.result is not OperationResult.RUNNING}

    @cached_property
    def left(self) -> float:
        return seconds_left(self.started_at, DEADLINE_SECONDS, self.now)

    @property
    def over(self) -> bool:
        """Every engine has answered, or those that are up have while the others were waited for, or its time is up."""
        waited = DEADLINE_SECONDS - self.left
        everyone = len(self.ended) == len(self.members) or waited >= ABSENT_SECONDS
        return self.left <= 0 or (bool(self.up) and len(self.ended) == len(self.up) and everyone)

    @property
    def next_look(self) -> float:
        """Seconds until time alone changes something."""
        absent = self.left - (DEADLINE_SECONDS - ABSENT_SECONDS)
        return absent if absent > 0 else self.left

    @property
    def missing(self) -> list[str]:
        """A sentence for each engine that has not answered."""
        if not self.up:
            return ["no engine is up"]
        return [f"{engine.name} {self._why(engine)}" for engine in self.members if engine.index not in self.ended]

    def _why(self, engine: EngineView) -> str:
        if not engine.serving:
            return "is not up"
        if engine.index not in self.begun and engine.released:
            return f"has released {', '.join(engine.released)}"
        return "did not answer"
