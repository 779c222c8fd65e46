"""One-shot operations over the fleet: weight checks and profiles.

A request is recorded in status as Running before any engine is told, so it is done once whoever leads. On a new
resource a request that is already there counts as done: a resource made anew from Git must not repeat it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from ..api import SGLangRollout, WeightsStatus
from ..api.conditions import seconds_left, shorten, timestamp
from ..api.status import EngineCheckStatus, ProfileStatus, WeightCheckStatus
from ..protocol.operations import Operation, OperationKind, OperationReport, OperationResult
from .engines import EngineView
from .planned import EventNote

DEADLINE_SECONDS = 600.0
ABSENT_SECONDS = 60.0  # that an engine which is not up is waited for
COUNTS_AS_DONE = "was there when the resource was made: counts as done"


@dataclass(frozen=True)
class OperationsPlan:
    """asked: by engine index. resetting: engines whose weights are about to be overwritten: they leave the routers
    first, and are told only when no router has them."""

    check: WeightCheckStatus | None
    profile: ProfileStatus | None
    asked: dict[int, list[Operation]] = field(default_factory=dict)
    resetting: frozenset[int] = frozenset()
    events: tuple[EventNote, ...] = ()
    wake: float | None = None


def advance(
    rollout: SGLangRollout,
    engines: Collection[EngineView],
    weights: WeightsStatus,
    unregistered: frozenset[int],
    now: datetime,
) -> OperationsPlan:
    """Where the requests of spec stand, and what engines are to be told."""
    members = [engine for engine in engines if engine.wanted]
    quiet = weights.phase in ("Idle", "Failed")
    check = _Check(rollout, members, weights, quiet, unregistered, now).plan()
    profile = _Profile(rollout, members, quiet, now).plan()
    asked = {
        engine.index: [*check.asked.get(engine.index, []), *profile.asked.get(engine.index, [])] for engine in members
    }
    return OperationsPlan(
        check=check.check,
        profile=profile.profile,
        asked={index: orders for index, orders in asked.items() if orders},
        resetting=check.resetting,
        events=(*check.events, *profile.events),
        wake=min((wake for wake in (check.wake, profile.wake) if wake is not None), default=None),
    )


def _is_over(members: Collection[EngineView], up: Collection[EngineView], ended: Collection[int], left: float) -> bool:
    """Every engine has answered, or those that are up have while the others were waited for, or its time is up."""
    waited = DEADLINE_SECONDS - left
    everyone = len(ended) == len(members) or waited >= ABSENT_SECONDS
    return left <= 0 or (bool(up) and len(ended) == len(up) and everyone)


def _next_look(left: float) -> float:
    """Seconds until time alone changes something."""
    absent = left - (DEADLINE_SECONDS - ABSENT_SECONDS)
    return absent if absent > 0 else left


def results(engines: Collection[EngineView], operation_id: str) -> dict[int, OperationReport]:
    """What engines report of an operation, by index; those that have not begun it are left out."""
    found = {}
    for engine in engines:
        for report in engine.leader.operations if engine.leader else ():
            if report.id == operation_id:
                found[engine.index] = report
    return found


@dataclass(frozen=True)
class _Check:
    rollout: SGLangRollout
    members: list[EngineView]
    weights: WeightsStatus
    quiet: bool
    unregistered: frozenset[int]
    now: datetime

    def plan(self) -> OperationsPlan:
        asked, last = self.rollout.spec.weight_check, self.rollout.status.last_weight_check
        if asked is None:
            return OperationsPlan(last, None)
        if last is None or last.request_id != asked.request_id:
            begun = WeightCheckStatus(
                request_id=asked.request_id, action=asked.action, result="Running", started_at=timestamp(self.now)
            )
            if self.rollout.status.observed_generation == 0:
                done = {"result": None, "completion_time": timestamp(self.now), "message": COUNTS_AS_DONE}
                begun = begun.model_copy(update=done)
            return OperationsPlan(begun, None)
        if last.result != "Running":
            return OperationsPlan(last, None)
        return self._running(last)

    def _running(self, last: WeightCheckStatus) -> OperationsPlan:
        operation = Operation(f"check:{last.request_id}", OperationKind(last.action))
        resetting = operation.kind is OperationKind.RESET
        up = [engine for engine in self.members if engine.serving]
        found = results(up, operation.id)
        left = seconds_left(last.started_at, DEADLINE_SECONDS, self.now)
        ended = {index: report for index, report in found.items() if report.result is not OperationResult.RUNNING}
        if _is_over(self.members, up, ended, left):
            done = self._ended(last, up, ended)
            text = f"{last.action} {last.request_id}: {done.result} {done.message}".strip()
            note = EventNote("Normal" if done.result == "Passed" else "Warning", "WeightCheck", text)
            return OperationsPlan(done, None, events=(note,))
        told = [e for e in up if self.quiet and (not resetting or e.index in self.unregistered or e.index in found)]
        return OperationsPlan(
            last,
            None,
            asked={engine.index: [operation] for engine in told},
            resetting=frozenset(e.index for e in up if e.index not in ended)
            if resetting and self.quiet
            else frozenset(),
            wake=_next_look(left),
        )

    def _ended(
        self, last: WeightCheckStatus, up: list[EngineView], ended: Mapping[int, OperationReport]
    ) -> WeightCheckStatus:
        names = {engine.index: engine.name for engine in self.members}
        late = [engine.name for engine in self.members if engine.index not in ended]
        differing = {names[i]: report for i, report in ended.items() if report.result is OperationResult.MISMATCH}
        unlike = _unlike_checksums({names[i]: report for i, report in ended.items()})
        failed = [f"{names[i]}: {r.message}" for i, r in ended.items() if r.result is OperationResult.ERROR]
        cannot = [f"{names[i]}: {r.message}" for i, r in ended.items() if r.result is OperationResult.UNSUPPORTED]
        mismatched = tuple(sorted({*differing, *unlike}))
        if mismatched:
            result, message = (
                "Mismatch",
                "; ".join([*(_differences(n, r) for n, r in differing.items()), *unlike.values()]),
            )
        elif failed or late or not up:
            waited = [f"{name} did not answer" for name in late] or ["no engine is up"]
            result, message = "Error", "; ".join(failed or waited)
        elif cannot:
            result, message = "Unsupported", "; ".join(cannot)
        else:
            result, message = "Passed", _passed(list(ended.values()))
        return last.model_copy(
            update={
                "result": result,
                "weight_version": self.weights.version,
                "completion_time": timestamp(self.now),
                "mismatched_engines": mismatched,
                "engines": tuple(
                    _of_engine(engine.name, ended.get(engine.index), unlike.get(engine.name)) for engine in self.members
                ),
                "message": shorten(message, 1024),
            }
        )


def _of_engine(name: str, report: OperationReport | None, unlike: str | None) -> EngineCheckStatus:
    """unlike: why its checksum, though it was made, is not right."""
    if report is None:
        return EngineCheckStatus(name=name, result="Error", message="did not answer")
    return EngineCheckStatus(
        name=name,
        result="Mismatch" if unlike else report.result.value,
        checksum=report.checksum[:128],
        mismatched_tensors=tuple(shorten(tensor, 256) for tensor in report.tensors[:10]),
        mismatched_count=report.differing,
        message=shorten(unlike or report.message, 256),
    )


def _passed(reports: list[OperationReport]) -> str:
    """With the checksum, for comparisons over time."""
    sums = sorted({report.checksum for report in reports if report.checksum})
    return f"{len(reports)} engines" + (f", checksum {', '.join(sums)}" if sums else "")


def _differences(name: str, report: OperationReport) -> str:
    more = report.differing - len(report.tensors)
    listed = ", ".join(report.tensors) + (f" and {more} more" if more > 0 else "")
    return f"{name}: {listed or report.message}"


def _unlike_checksums(reports: Mapping[str, OperationReport]) -> dict[str, str]:
    """Engines whose sum differs from that of most engines of the same sharding, with a sentence for each."""
    unlike: dict[str, str] = {}
    for sharding in sorted({report.sharding for report in reports.values() if report.checksum}):
        sums = {n: r.checksum for n, r in reports.items() if r.checksum and r.sharding == sharding}
        if len(set(sums.values())) < 2:
            continue
        most = max(sorted(set(sums.values())), key=lambda value: list(sums.values()).count(value))
        unlike |= {name: f"{name}: checksum {value}, most have {most}" for name, value in sums.items() if value != most}
    return unlike


@dataclass(frozen=True)
class _Profile:
    rollout: SGLangRollout
    members: list[EngineView]
    quiet: bool
    now: datetime

    def plan(self) -> OperationsPlan:
        asked, last = self.rollout.spec.profile, self.rollout.status.last_profile
        if asked is None:
            return OperationsPlan(None, last)
        if last is None or last.request_id != asked.request_id:
            begun = ProfileStatus(request_id=asked.request_id, result="Running", started_at=timestamp(self.now))
            if self.rollout.status.observed_generation == 0:
                done = {"result": None, "completion_time": timestamp(self.now), "message": COUNTS_AS_DONE}
                begun = begun.model_copy(update=done)
            return OperationsPlan(None, begun)
        if last.result != "Running":
            return OperationsPlan(None, last)
        operation = Operation(f"profile:{last.request_id}", OperationKind.PROFILE, steps=asked.steps)
        up = [engine for engine in self.members if engine.serving]
        found = results(up, operation.id)
        ended = {index: report for index, report in found.items() if report.result is not OperationResult.RUNNING}
        left = seconds_left(last.started_at, DEADLINE_SECONDS, self.now)
        if _is_over(self.members, up, ended, left):
            bad = [r for r in ended.values() if r.result is not OperationResult.PASSED]
            missing = len(self.members) - len(ended)
            said = "; ".join(report.message for report in ended.values())
            message = said + (f"; {missing} engines did not answer" if missing else "")
            done = {
                "result": "Error" if bad or missing else "Completed",
                "completion_time": timestamp(self.now),
                "message": shorten(message, 1024),
            }
            return OperationsPlan(None, last.model_copy(update=done))
        return OperationsPlan(None, last, asked={e.index: [operation] for e in up if self.quiet}, wake=_next_look(left))
