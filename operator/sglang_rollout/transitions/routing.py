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
from ..api.names import CONTAINER_ROUTER
from ..protocol.pod import ENGINE_PORT
from ..protocol.routing import RouterDesired, RouterReport, Worker
from .engines import EngineView
from .groups import GroupState
from .observed import Observed, PodView
from .versions import is_allowed
from .weight_steps import WeightsPlan

WORDS_SHOWN = 3


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
    their pods, their memory or their weights. generation: of the resource. listed: what listed_in says."""
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


def listed_in(reports: Iterable[RouterReport]) -> frozenset[tuple[str, int]]:
    """Names and incarnations of the engines that a router has."""
    return frozenset((worker.engine, worker.incarnation) for report in reports for worker in report.registered)


def desired_workers(
    engines: Iterable[EngineView], groups: Mapping[int, GroupState], plan: WeightsPlan
) -> RouterDesired:
    """What the routers must have when exactly `engines` are routable."""
    workers = [_worker(engine, groups[engine.index], _label(engine, plan)) for engine in engines]
    # Labels are left out: a router must not drop a worker, and the requests that wait at it, for a new label.
    identity = json.dumps(sorted((worker.url, worker.api_key, worker.engine) for worker in workers))
    return RouterDesired(lease_term=0, id=hashlib.sha256(identity.encode()).hexdigest()[:24], workers=workers)


def all_in_step(desired: RouterDesired, observed: Observed) -> bool:
    """Whether every router pod that can take requests has exactly these workers."""
    reports = observed.routers
    taking = [pod for pod in observed.router_pods if takes_requests(pod, observed)]
    return all(p.uid in reports and p.uid not in observed.untold and _has(desired, reports[p.uid]) for p in taking)


def words(desired: RouterDesired, observed: Observed) -> tuple[str, ...]:
    """What routers that do not have exactly these workers say of it themselves, a few of them."""
    said = [*observed.parting]
    external = observed.external_router
    if external is not None and external.message:
        said.append(external.message)
    for pod in observed.router_pods:
        report = observed.routers.get(pod.uid)
        if report is not None and not _has(desired, report) and report.message:
            said.append(f"router pod {pod.name}: {report.message}")
        elif report is None and pod.uid in observed.silent:
            said.append(f"router pod {pod.name}: {observed.silent[pod.uid]}")
    return tuple(said[:WORDS_SHOWN])


def takes_requests(pod: PodView, observed: Observed) -> bool:
    """Whether requests may come through this router pod: its Service names it, or its router runs and serves
    connections of before, which it does for a while after its end was ordered, too. Of a pod that should end and is not
    heard the node is lost. One that is not running, not ready and not heard has no workers: its sidecar registers
    before it becomes ready."""
    if pod.phase in ("Failed", "Succeeded"):
        return False
    if pod.uid in observed.routers:
        return True
    runs = pod.ready or any(container.name == CONTAINER_ROUTER and container.running for container in pod.containers)
    return runs and (not pod.terminating or pod.uid not in observed.silent)


def _has(desired: RouterDesired, report: RouterReport) -> bool:
    # A router that is down has no workers at all; its sidecar registers the desired ones when it is back.
    return report.desired_id == desired.id and (report.in_step or not report.router_up)


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
