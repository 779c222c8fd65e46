"""The status that a person, a trainer and `kubectl wait` read: engines, counts and conditions, all computed anew."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from ..api import SGLangRollout, Status, names
from ..api.conditions import timestamp
from ..api.memory import Residency
from ..api.status import MemoryStatus, RestartStatus, RouterStatus
from ..protocol.memory import MemoryTag
from ..protocol.pod import ROUTER_PORT
from .engine_status import engine_status
from .engines import EngineView
from .fleet_conditions import conditions
from .fleet_facts import FleetFacts, execution_phase


def summarize(rollout: SGLangRollout, facts: FleetFacts, now: datetime) -> Status:
    """The whole status."""
    spec = rollout.spec
    wanted = [engine for engine in facts.engines if engine.wanted]
    return Status(
        observed_generation=rollout.metadata.generation,
        replicas=sum(1 for engine in facts.engines if engine.statefulset is not None),
        ready_replicas=sum(1 for engine in wanted if engine.ready),
        routable_replicas=len(facts.registered),
        selector=names.rank0_selector(rollout.metadata.name),
        execution_state=execution_phase(wanted, spec, facts.weights),
        memory=_memory_status(wanted),
        weights=facts.weights,
        engines=tuple(engine_status(engine, facts) for engine in facts.engines),
        router=RouterStatus(url=facts.router_url, registered=len(facts.registered)),
        last_restart=_last_restart(rollout, facts, now),
        last_profile=facts.ordered.profile,
        last_flush_cache=facts.ordered.flush_cache,
        last_abort_requests=facts.ordered.abort_requests,
        last_weight_check=facts.ordered.check,
        conditions=conditions(rollout, facts, now),
    )


def router_url(rollout: SGLangRollout) -> str:
    """Where clients send requests."""
    if rollout.spec.router.external is not None:
        return rollout.spec.router.external.url
    name = names.router_name(rollout.metadata.name)
    return f"http://{name}.{rollout.metadata.namespace}:{ROUTER_PORT}"


def _memory_status(wanted: Collection[EngineView]) -> MemoryStatus:
    """Released only when it is on every engine: one that is down comes back with everything resident."""

    def residency(tag: MemoryTag) -> Residency:
        released = wanted and all(engine.serving and tag in engine.released for engine in wanted)
        return "Released" if released else "Resident"

    return MemoryStatus(
        weights=residency(MemoryTag.WEIGHTS),
        kv_cache=residency(MemoryTag.KV_CACHE),
        cuda_graph=residency(MemoryTag.CUDA_GRAPH),
    )


def _last_restart(rollout: SGLangRollout, facts: FleetFacts, now: datetime) -> RestartStatus | None:
    """A restart that is asked for replaces the pods as a change of spec does; on a new resource it counts as done."""
    asked = rollout.spec.restart
    before = rollout.status.last_restart
    if asked is None:
        return before
    if before is None or before.request_id != asked.request_id:
        fresh = rollout.status.observed_generation == 0
        started = timestamp(now)
        return RestartStatus(
            request_id=asked.request_id, started_at=started, completion_time=started if fresh else None
        )
    if before.completion_time is not None:
        return before
    wanted = [engine for engine in facts.engines if engine.wanted]
    back = sum(1 for e in wanted if e.index not in facts.outdated and e.index in facts.registered)
    return before.model_copy(
        update={"restarted": back, "completion_time": timestamp(now) if back == len(wanted) else None}
    )
