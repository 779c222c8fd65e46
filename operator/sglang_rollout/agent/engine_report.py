"""What is told of the engine: read from it and from its launcher's record."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_rollout.protocol.report import EngineReport, EngineState

from .engine_watch import EngineWatch
from .situation import EngineFacts, Situation


@dataclass(frozen=True)
class Waiting:
    """A start that waits for its order, and for what; both empty when none does."""

    start_id: str
    reason: str


def engine_report(
    watch: EngineWatch, state: EngineState, situation: Situation | None, waiting: Waiting
) -> EngineReport:
    """`situation`: None before the first desired state; then /ready alone says whether the engine is paused."""
    record = watch.record
    facts = situation.facts if situation else watch.facts
    unknown = situation is not None and bool(situation.void or situation.dirty)
    failure = record.failure if record and record.exited else watch.refusal
    if state is EngineState.WAITING:
        return EngineReport(state, waiting.start_id, failure=waiting.reason or failure)
    if record is None or state is EngineState.ABSENT:
        return EngineReport(EngineState.ABSENT, failure=failure)
    return EngineReport(
        state=state,
        start_id=record.start_id,
        started_at=record.started_at,
        # A label beside bytes that nobody has read back may be a lie.
        weight_version="" if unknown else facts.weights.version,
        model_path=facts.weights.path,
        data_key=record.data_key,
        paused=facts.state is EngineState.SERVING and _paused(facts, situation),
        sglang_version=watch.sglang_version,
        failure=failure,
        launch=record.order.launch,
        released=sorted(situation.released) if situation else [],
        weights_void=situation.void if situation else "",
        weights_root=situation.held_root if situation and not unknown else "",
        weights_checksum=situation.held_checksum if situation and not unknown else "",
        weights_sharding=situation.held_sharding if situation and not unknown else "",
    )


def _paused(facts: EngineFacts, situation: Situation | None) -> bool:
    """As the engine itself says when somebody else drives it: what we did to it before says nothing then."""
    if situation is None or situation.desired.hands_off:
        return not facts.ready
    return situation.pause is not None
