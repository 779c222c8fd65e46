"""What is told of the engine: read from it and from its launcher's record."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_rollout.protocol.report import EngineReport, EngineState

from . import plan
from .engine_watch import EngineWatch
from .sglang import Load


@dataclass(frozen=True)
class Waiting:
    """A start that waits for its order, and for what; both empty when none does."""

    start_id: str
    reason: str


def engine_report(
    watch: EngineWatch, state: EngineState, situation: plan.Situation | None, load: Load, waiting: Waiting
) -> EngineReport:
    """`situation`: None before the first desired state; then /ready alone says whether the engine is paused."""
    record, facts = watch.record, watch.facts
    failure = record.failure if record and record.exited else ""
    if state is EngineState.WAITING:
        return EngineReport(state, waiting.start_id, failure=waiting.reason or failure)
    if record is None or state is EngineState.ABSENT:
        return EngineReport(EngineState.ABSENT, failure=failure)
    serving = facts.state is EngineState.SERVING
    return EngineReport(
        state=state,
        start_id=record.start_id,
        started_at=record.started_at,
        weight_version=facts.weights.version,
        model_path=facts.weights.path,
        data_key=record.data_key,
        paused=serving and (situation.pause is not None if situation else not facts.ready),
        sglang_version=watch.sglang_version,
        running_requests=load.running,
        queued_requests=load.queued,
    )
