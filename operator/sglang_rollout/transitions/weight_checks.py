"""Weight checks over the fleet: each engine's own answer, and checksums of equal sharding compared with each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from ..api import SGLangRollout, WeightsStatus
from ..api.conditions import shorten, timestamp
from ..api.status import EngineCheckStatus, WeightCheckStatus
from ..protocol.operations import Operation, OperationKind, OperationReport, OperationResult
from . import one_shot
from .checksums import unlike
from .engines import EngineView
from .one_shot import Advance, Answers
from .planned import EventNote


@dataclass(frozen=True)
class WeightChecks:
    """quiet: no weight move is under way. unregistered: engines that no router has."""

    rollout: SGLangRollout
    members: list[EngineView]
    weights: WeightsStatus
    quiet: bool
    unregistered: frozenset[int]
    now: datetime

    def advance(self) -> Advance[WeightCheckStatus]:
        asked, last = self.rollout.spec.weight_check, self.rollout.status.last_weight_check
        if asked is None:
            return Advance(last)
        if last is None or last.request_id != asked.request_id:
            first = WeightCheckStatus(request_id=asked.request_id, action=asked.action)
            return Advance(one_shot.begin(first, self.rollout.status.observed_generation == 0, self.now))
        if last.result != "Running":
            return Advance(last)
        if self.rollout.spec.control == "External":
            return self._told(self._over(last, {"result": "Unsupported", "message": one_shot.EXTERNAL}))
        operation = Operation(f"check:{last.request_id}", OperationKind(last.action))
        return self._running(last, Answers(self.members, operation, last.started_at, self.now))

    def _running(self, last: WeightCheckStatus, answers: Answers) -> Advance[WeightCheckStatus]:
        if answers.over:
            return self._told(self._over(last, self._verdict(answers)))
        resetting = answers.operation.kind is OperationKind.RESET
        told = [
            engine
            for engine in answers.up
            if engine.index in answers.begun or (self.quiet and (not resetting or engine.index in self.unregistered))
        ]
        # Of a reset: the process that was seen to be in no router. One that starts later may be in them by the time
        # that it reads an order of before.
        meant = {e.index: replace(answers.operation, start_id=e.start_id if resetting else "") for e in told}
        leaving = [engine.index for engine in answers.up if engine.index not in answers.ended]
        return Advance(
            last,
            asked=meant,
            resetting=frozenset(leaving if resetting and self.quiet else ()),
            wake=answers.next_look,
        )

    def _told(self, done: WeightCheckStatus) -> Advance[WeightCheckStatus]:
        text = f"{done.action} {done.request_id}: {done.result} {done.message}".strip()
        note = EventNote("Normal" if done.result == "Passed" else "Warning", "WeightCheck", text)
        return Advance(done, events=(note,))

    def _over(self, last: WeightCheckStatus, verdict: Mapping[str, object]) -> WeightCheckStatus:
        ended = {"completion_time": timestamp(self.now), "weight_version": self.weights.version}
        return last.model_copy(update={**ended, **verdict})

    def _verdict(self, answers: Answers) -> dict[str, object]:
        names = {engine.index: engine.name for engine in self.members}
        said = {names[index]: report for index, report in answers.ended.items()}
        differing = {name: report for name, report in said.items() if report.result is OperationResult.MISMATCH}
        odd = _unlike_checksums(said)
        failed = [f"{name}: {r.message}" for name, r in said.items() if r.result is OperationResult.ERROR]
        cannot = [f"{name}: {r.message}" for name, r in said.items() if r.result is OperationResult.UNSUPPORTED]
        if differing or odd:
            result = "Mismatch"
            message = "; ".join([*(_differences(n, r) for n, r in differing.items()), *odd.values()])
        elif failed or answers.missing:
            result, message = "Error", "; ".join(failed or answers.missing)
        elif cannot:
            result, message = "Unsupported", "; ".join(cannot)
        else:
            result, message = "Passed", _passed(list(said.values()))
        return {
            "result": result,
            "mismatched_engines": tuple(sorted({*differing, *odd})),
            "engines": tuple(_of_engine(e.name, said.get(e.name), odd.get(e.name)) for e in self.members),
            "message": shorten(message, 1024),
        }


def _of_engine(name: str, report: OperationReport | None, odd: str | None) -> EngineCheckStatus:
    """odd: why its checksum, though it was made, is not right."""
    if report is None:
        return EngineCheckStatus(name=name, result="Error", message="did not answer")
    return EngineCheckStatus(
        name=name,
        result="Mismatch" if odd else report.result.value,
        checksum=report.checksum[:128],
        mismatched_tensors=tuple(shorten(tensor, 256) for tensor in report.tensors[:10]),
        mismatched_count=report.differing,
        message=shorten(odd or report.message, 256),
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
    """Engines whose sum is not that of most engines of the same sharding, with a sentence for each."""
    sums = {name: (report.sharding, report.checksum) for name, report in reports.items()}
    return {name: f"{name}: {why}" for name, why in unlike(sums).items()}
