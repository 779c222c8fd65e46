"""When a verb is done: from the resource alone. Nothing older than the change that the verb made counts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..api import ConditionType, EngineStatus, SGLangRollout, Status, find_condition
from ..api.status import RequestStatus
from ..api.support import REASON as NOT_IMPLEMENTED
from .patches import difference, leaves

UNUSABLE_SPEC = "UnusableSpec"  # reason of Degraded: the operator can act on nothing before spec changes
AGENTS_BEHIND = "AgentsBehind"  # reason of Progressing: some agent acts on an older spec still


@dataclass(frozen=True)
class Progress:
    """message: a sentence. done, of: engines that are there; of 0: not counted."""

    state: Literal["Waiting", "Done", "Failed"]
    message: str
    done: int = 0
    of: int = 0


Goal = Callable[[SGLangRollout], Progress]


@dataclass(frozen=True)
class Asked:
    """A goal that belongs to a patch of spec (empty: to spec as it is), made in `generation`."""

    generation: int
    patch: Mapping[str, Any]
    reached: Goal

    def __call__(self, rollout: SGLangRollout) -> Progress:
        spec = rollout.spec.model_dump(mode="json", by_alias=True)
        if rollout.metadata.generation > self.generation and (other := difference(spec, self.patch)):
            return Progress("Failed", f"somebody asked for something else meanwhile: {other} now")
        if rollout.status.observed_generation < self.generation:
            return Progress("Waiting", "the operator has not seen the change yet", 0, len(rollout.status.engines))
        progress = self.reached(rollout)
        if progress.state == "Waiting" and (stopped := self._stopped(rollout.status)):
            return Progress("Failed", stopped, progress.done, progress.of)
        return progress

    def _stopped(self, status: Status) -> str:
        """Why waiting is in vain, as the operator says it; empty: it is not."""
        degraded = find_condition(status.conditions, ConditionType.DEGRADED)
        if degraded is None or degraded.status != "True" or degraded.observed_generation < self.generation:
            return ""
        gaps = re.findall(r"spec(?:\.\w+)+", degraded.message) if degraded.reason == NOT_IMPLEMENTED else []
        ours = any(path == gap or path.startswith(f"{gap}.") for path, _ in leaves(self.patch) for gap in gaps)
        return degraded.message if ours or degraded.reason == UNUSABLE_SPEC else ""


def execution(state: str) -> Goal:
    """All engines that are up generate, or none does."""

    def reached(rollout: SGLangRollout) -> Progress:
        engines = rollout.status.engines
        there = sum(1 for engine in engines if engine.paused == (state == "Paused"))
        word = "paused" if state == "Paused" else "running"
        behind = _reason(rollout, ConditionType.PROGRESSING) == AGENTS_BEHIND
        if rollout.status.execution_state == state and not behind:
            return Progress("Done", f"{there} of {len(engines)} engines are {word}", there, len(engines))
        return Progress("Waiting", _news(rollout), there, len(engines))

    return reached


def memory(residency: str, tags: Iterable[str], state: str | None = None) -> Goal:
    """These tags are Released or Resident on every engine; state: and execution, too."""
    wanted = tuple(tags)

    def there(engine: EngineStatus) -> bool:
        released = set(engine.released)
        return released.issuperset(wanted) if residency == "Released" else released.isdisjoint(wanted)

    def reached(rollout: SGLangRollout) -> Progress:
        engines = rollout.status.engines
        count = sum(1 for engine in engines if there(engine))
        reported = rollout.status.memory.to_object() if rollout.status.memory else {}
        settled = all(reported.get(tag) == residency for tag in wanted) or rollout.spec.replicas == 0
        # The fleet's word is Resident as soon as one engine is.
        if not settled or (residency == "Resident" and count < len(engines)):
            return Progress("Waiting", _news(rollout), count, len(engines))
        if state is not None and (running := execution(state)(rollout)).state != "Done":
            return running
        listed = ", ".join(wanted)
        return Progress("Done", f"{listed} {residency} on {count} of {len(engines)} engines", count, len(engines))

    return reached


def weights(version: str) -> Goal:
    """Every routable engine serves `version`, and every engine that is up has it."""

    def reached(rollout: SGLangRollout) -> Progress:
        status, now = rollout.status, rollout.status.weights
        of = len(status.engines)
        if now is None:
            return Progress("Waiting", _news(rollout), 0, of)
        move = now.transaction if now.transaction is not None and now.transaction.version == version else None
        at_version = sum(1 for engine in status.engines if engine.weight_version == version)
        moving = now.phase in ("Committing", "Verifying")
        consistent = find_condition(status.conditions, ConditionType.WEIGHTS_CONSISTENT)
        if now.version == version and not moving and consistent is not None and consistent.status == "True":
            stall = f", none waited longer than {move.stall_seconds} s" if move and move.stall_seconds else ""
            return Progress("Done", f"{at_version} of {of} engines serve {version}{stall}", at_version, of)
        if move is None:
            return Progress("Waiting", _news(rollout), at_version, of)
        if now.phase == "Failed":
            return Progress("Failed", f"{version}: {move.message or 'failed'}; {now.version} serves on", at_version, of)
        text = f"{now.phase}: {move.prepared} prepared, {move.committed} committed of {of}"
        return Progress("Waiting", f"{text}; {move.message}" if move.message else text, move.committed, of)

    return reached


def weight_check(request_id: str) -> Goal:
    """Passed. Ended without a result (a request that a new resource came with is never done) is a failure, too."""

    def reached(rollout: SGLangRollout) -> Progress:
        check, of = rollout.status.last_weight_check, len(rollout.status.engines)
        if check is None or check.request_id != request_id:
            return Progress("Waiting", _news(rollout), 0, of)
        if check.completion_time is None and check.result in (None, "Running"):
            return Progress("Waiting", f"{check.action} is running", 0, of)
        at = f" of version {check.weight_version}" if check.weight_version else ""
        said = f"{check.action}{at}: {check.result or 'not done'}"
        if check.mismatched_engines:
            said += f" on {', '.join(check.mismatched_engines)}"
        said += f": {check.message}" if check.message else ""
        return Progress("Done" if check.result == "Passed" else "Failed", said, of, of)

    return reached


def profile(request_id: str) -> Goal:
    return _request(request_id, "profile", lambda status: status.last_profile)


def flush_cache(request_id: str) -> Goal:
    return _request(request_id, "flush of the cache", lambda status: status.last_flush_cache)


def abort_requests(request_id: str) -> Goal:
    return _request(request_id, "abort of all requests", lambda status: status.last_abort_requests)


def _request(request_id: str, what: str, last: Callable[[Status], RequestStatus | None]) -> Goal:
    """Completed; ended in any other way is a failure."""

    def reached(rollout: SGLangRollout) -> Progress:
        made, of = last(rollout.status), len(rollout.status.engines)
        if made is None or made.request_id != request_id:
            return Progress("Waiting", _news(rollout), 0, of)
        if made.completion_time is None and made.result in (None, "Running"):
            return Progress("Waiting", f"the {what} is running", 0, of)
        said = f"{what} {made.result or 'not done'}" + (f": {made.message}" if made.message else "")
        return Progress("Done" if made.result == "Completed" else "Failed", said, of, of)

    return reached


def restart(request_id: str) -> Goal:
    """Every engine is back."""

    def reached(rollout: SGLangRollout) -> Progress:
        made, of = rollout.status.last_restart, rollout.spec.replicas
        if made is None or made.request_id != request_id:
            return Progress("Waiting", _news(rollout), 0, of)
        if made.completion_time is None:
            return Progress("Waiting", _news(rollout), min(made.restarted, of), of)
        return Progress("Done", f"{of} of {of} engines are back", of, of)

    return reached


def _news(rollout: SGLangRollout) -> str:
    """What the operator is at, as it says it."""
    conditions = rollout.status.conditions
    for kind in (ConditionType.PROGRESSING, ConditionType.DEGRADED):
        condition = find_condition(conditions, kind)
        if condition is not None and condition.status == "True":
            return condition.message
    ready = find_condition(conditions, ConditionType.READY)
    return ready.message if ready is not None and ready.status != "True" else "waiting for the engines"


def _reason(rollout: SGLangRollout, kind: ConditionType) -> str:
    condition = find_condition(rollout.status.conditions, kind)
    return condition.reason if condition is not None and condition.status == "True" else ""
