"""Which engines the routers must have: the publication boundary of the weights.

An engine is registered only at an allowed version, read back from it. It leaves before anything that would make it
wrong. What is unknown is not registered; only a leader that has just begun, and has not heard every agent yet, leaves
the routers as they are for that while.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping

from ..api import WeightsStatus
from ..protocol.pod import ENGINE_PORT
from ..protocol.routing import RouterDesired, Worker
from .engines import EngineView
from .groups import GroupState
from .versions import is_allowed
from .weight_steps import WeightsPlan


def obstacle(
    engine: EngineView,
    group: GroupState,
    plan: WeightsPlan,
    max_lag: int,
    generation: int,
    leaving: Collection[int],
    listed: Collection[tuple[str, int]],
) -> str:
    """Why the routers must not have this engine now; empty when they must. leaving: engines that are about to lose
    their pods, their memory or their weights. generation: of the resource. listed: as router_reports.listed_in() has
    them."""
    if not engine.wanted:
        return "it is being removed"
    if engine.index in leaving:
        return "its pods, memory or weights are about to be taken away"
    if engine.index in plan.restarts:
        return "it is to start again"
    if engine.released:
        return f"it has released {', '.join(engine.released)}"
    if engine.void:
        return f"it holds no weights ({engine.void})"
    if not group.whole:
        return group.message or "its pods are not one group yet"
    if engine.unlike:
        return engine.unlike
    if not engine.leader or not engine.healthy or not engine.leader.engine.data_key:
        return "it does not serve" if not engine.dirty else "its weights may be of two versions"
    registered = was_registered(engine, group, listed)
    if engine.index in plan.holds and registered:
        return ""
    # What was ordered for an older generation (a release, say) may still be under way behind an older report.
    if not registered and engine.leader.generation < generation:
        return f"it has not heard of generation {generation} yet"
    if plan.closed:
        return "it takes no part in the move of the others"
    allowed = is_allowed(plan.status, engine.version, max_lag)
    return "" if allowed else f"it holds version {engine.version}, and the fleet serves {plan.status.version}"


def was_registered(engine: EngineView, group: GroupState, listed: Collection[tuple[str, int]]) -> bool:
    """Whether the routers were given this very engine process: by the status, which may be told late, or by a router's
    own word. Nothing that takes an engine out of the routers has begun on one that a router still has."""
    return engine.was_given or (engine.name, group.incarnation) in listed


def desired_workers(
    engines: Iterable[EngineView], groups: Mapping[int, GroupState], plan: WeightsPlan
) -> RouterDesired:
    """What the routers must have when exactly `engines` are routable."""
    workers = [_worker(engine, groups[engine.index], _label(engine, plan)) for engine in engines]
    # Labels are left out: a router must not drop a worker, and the requests that wait at it, for a new label.
    identity = json.dumps(sorted((worker.url, worker.api_key, worker.engine) for worker in workers))
    return RouterDesired(lease_term=0, id=hashlib.sha256(identity.encode()).hexdigest()[:24], workers=workers)


def _label(engine: EngineView, plan: WeightsPlan) -> str:
    """The version that a router names it by. At a barrier it is that of before until all have applied the next: no
    router is told anew for each engine that has, while it generates nothing anyway."""
    return plan.status.version if plan.closed and engine.index in plan.holds else engine.version


def _worker(engine: EngineView, group: GroupState, label: str) -> Worker:
    assert engine.leader is not None
    return Worker(
        url=f"http://{engine.pods[0].ip}:{ENGINE_PORT}",
        api_key=engine.leader.engine.data_key,
        engine=engine.name,
        incarnation=group.incarnation,
        weight_version=label,
    )


def version_lag(weights: WeightsStatus, engines: Iterable[EngineView]) -> int:
    """The largest lag among `engines`, in versions; 0 when there are none."""
    return max((weights.lag(engine.version) or 0 for engine in engines), default=0)
