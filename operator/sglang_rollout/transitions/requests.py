"""Profiles, flushes of the KV cache and aborts of all requests over the fleet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from ..api import SGLangRollout
from ..api.conditions import shorten, timestamp
from ..api.operations import AbortRequests, FlushCache, Profile
from ..api.status import RequestStatus
from ..protocol.operations import Operation, OperationKind, OperationResult
from . import one_shot
from .engines import EngineView
from .one_shot import Advance, Answers
from .planned import EventNote

FLUSH_SECONDS = 60.0  # that an engine may be too busy to be flushed


@dataclass(frozen=True)
class Requests:
    """quiet: no weight move is under way."""

    rollout: SGLangRollout
    members: list[EngineView]
    quiet: bool
    now: datetime

    def profile(self) -> Advance[RequestStatus]:
        asked = self.rollout.spec.profile
        order = Operation("profile", OperationKind.PROFILE, steps=asked.steps if asked else 0)
        return self._advance(asked, self.rollout.status.last_profile, order)

    def flush_cache(self) -> Advance[RequestStatus]:
        order = Operation("flush", OperationKind.FLUSH, timeout_seconds=FLUSH_SECONDS)
        return self._advance(self.rollout.spec.flush_cache, self.rollout.status.last_flush_cache, order)

    def abort_requests(self) -> Advance[RequestStatus]:
        order = Operation("abort", OperationKind.ABORT)
        return self._advance(self.rollout.spec.abort_requests, self.rollout.status.last_abort_requests, order)

    def _advance(
        self, asked: Profile | FlushCache | AbortRequests | None, last: RequestStatus | None, order: Operation
    ) -> Advance[RequestStatus]:
        """order: its id is completed by that of the request."""
        if asked is None:
            return Advance(last)
        if last is None or last.request_id != asked.request_id:
            first = RequestStatus(request_id=asked.request_id)
            return Advance(one_shot.begin(first, self.rollout.status.observed_generation == 0, self.now))
        if last.result != "Running":
            return Advance(last)
        if self.rollout.spec.control == "External":
            return self._over(last, order, {"result": "Error", "message": one_shot.EXTERNAL})
        operation = replace(order, id=f"{order.id}:{last.request_id}")
        answers = Answers(self.members, operation, last.started_at, self.now)
        if answers.over:
            return self._over(last, order, self._verdict(answers))
        # An abort may be what a weight move waits for: requests that hold the cache.
        now = self.quiet or operation.kind is OperationKind.ABORT
        told = [engine.index for engine in answers.up if now or engine.index in answers.begun]
        return Advance(last, asked=dict.fromkeys(told, operation), wake=answers.next_look)

    def _over(self, last: RequestStatus, order: Operation, verdict: Mapping[str, object]) -> Advance[RequestStatus]:
        done = last.model_copy(update={"completion_time": timestamp(self.now), **verdict})
        text = f"{order.id} {done.request_id}: {done.result} {done.message}".strip()
        note = EventNote("Normal" if done.result == "Completed" else "Warning", _EVENTS[order.kind], text)
        return Advance(done, events=(note,))

    def _verdict(self, answers: Answers) -> dict[str, object]:
        names = {engine.index: engine.name for engine in self.members}
        said = {names[index]: report for index, report in answers.ended.items()}
        bad = [f"{name}: {r.message}" for name, r in said.items() if r.result is not OperationResult.PASSED]
        well = [report.message for report in said.values() if report.result is OperationResult.PASSED]
        parts = [*bad, *answers.missing, *filter(None, well)] or [f"{len(said)} engines"]
        failed = bad or answers.missing
        return {"result": "Error" if failed else "Completed", "message": shorten("; ".join(parts), 1024)}


_EVENTS = {
    OperationKind.PROFILE: "Profile",
    OperationKind.FLUSH: "CacheFlush",
    OperationKind.ABORT: "RequestsAborted",
}
