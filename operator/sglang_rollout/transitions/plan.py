"""The whole plan of a fleet: from one observation to everything that is to be done next.

The order of reasoning: which pods are an engine (groups), which pods are of the present spec (revisions), which
weights each engine must have (weights), what it keeps in GPU memory (memory) and is asked to do once (operations),
which engines the routers may have (routing), and what to say (summary).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from ..api import Spec, names
from ..protocol.desired import AgentDesired, Execution, ExecutionState
from ..protocol.routing import RouterDesired
from ..protocol.weights import PauseMode
from . import (
    children,
    diagnosis,
    groups,
    members,
    memory,
    news,
    operations,
    removals,
    revisions,
    router_reports,
    routing,
    weights,
)
from .engines import EngineView, view_engines
from .fleet_facts import FleetFacts
from .groups import GroupState
from .memory import MemoryPlan
from .observed import Observed, PodView
from .operations import OperationsPlan
from .planned import ANNOTATION_SPEC_HASH, DeleteOrder, Plan, Rest, soonest
from .revisions import Revision
from .summary import router_url, summarize
from .versions import is_allowed
from .weight_steps import WeightsPlan


def plan(observed: Observed, now: datetime) -> Plan:
    """What to do next for this fleet. Pure: equal arguments, equal plans."""
    rollout = observed.rollout
    spec = rollout.spec
    engines = view_engines(observed, now)
    states = {engine.index: groups.advance(engine, spec.restart_policy, now) for engine in engines}
    unregistered = router_reports.unregistered(engines, observed)
    engine_stamp, router_stamp = revisions.spec_hash(spec), revisions.router_hash(spec)
    revision = revisions.advance(
        engines,
        engine_stamp,
        spec.weights.update_strategy.max_unavailable,
        unregistered,
        _coming(engines, observed),
    )
    agreed = _agree(observed, engines, states, revision, unregistered, now)
    moved, ordered, obstacles = agreed.weights, agreed.operations, agreed.obstacles
    desired, in_step = agreed.workers, agreed.in_step
    # What takes an engine's memory waits for the routers' word that they have exactly the others: a router that has
    # not taken the last order may still follow an older one.
    free = unregistered if in_step else frozenset[int]()
    residency = memory.advance(engines, spec, free)
    revision, residency = revision.without(moved.engaged), residency.without(moved.engaged)
    restarts = {**residency.restarts, **_restarts(engines, moved, free)}
    # A leader that has not heard every agent yet knows too little to take a registered engine out of the routers.
    unheard = [engine for engine in engines if engine.unheard]
    listed = router_reports.listed_names(observed) if unheard else frozenset()
    hearing = any(engine.record.routable or engine.name in listed for engine in unheard)
    external = spec.router.external is not None
    lost_in = members.seconds_to_loss(observed.pods, now)
    wake = soonest(moved.wake, ordered.wake, lost_in, *(state.wake for state in states.values()))

    def rest() -> Rest:
        manifests, spec_error = children.manifests(observed, engines, revision, moved.boot, engine_stamp, router_stamp)
        facts = FleetFacts(
            engines=engines,
            groups=states,
            obstacles=obstacles,
            registered=router_reports.registered(engines, observed) - obstacles.keys(),
            # An order that is on its way is no news to people.
            routers_in_step=in_step or router_reports.in_step(router_reports.with_orders_heard(observed), desired),
            router_words=() if in_step else router_reports.words(observed, desired),
            keeps_dirty=spec.weights.failure_policy == "KeepGated",
            router_behind=_router_behind(observed, router_stamp),
            weights=moved.status,
            outdated=revision.outdated,
            problems=news.problems(engines, moved),
            fleet_problems=(*diagnosis.children_problems(observed), *diagnosis.router_problems(observed.router_pods)),
            spec_error=spec_error,
            router_url=router_url(rollout),
            lost=news.lost(observed, now),
            lacking_flags=residency.lacking,
            ordered=ordered,
        )
        removed = removals.parting_engines(engines, unregistered - moved.engaged, observed)
        unused = () if spec_error else removals.unused_router(observed, manifests)
        return Rest(
            status=summarize(rollout, facts, now),
            applies=manifests,
            deletes=(*_pod_deletes(states, revision), *removed, *unused),
            events=(
                *moved.events,
                *ordered.events,
                *news.events(observed, engines, states, residency, facts.lost, removed),
            ),
        )

    return Plan(
        work_out_rest=rest,
        phase=moved.status.phase,
        has_news=bool(moved.events or ordered.events),
        agents=_agents(observed, engines, states, revision, moved, residency, restarts, ordered),
        routers={} if hearing else {pod.uid: desired for pod in observed.router_pods if pod.ip},
        external_router=desired if external and not hearing else None,
        left_out={engine.name: obstacles[engine.index] for engine in engines if engine.index in obstacles},
        decision=moved.decision,
        requeue_after=None if wake is None else max(wake, 0.0),
    )


@dataclass(frozen=True)
class _Agreed:
    """The weights' next step, what the engines are ordered to do once, and the workers that the routers must have with
    them. obstacles: engines that the routers must not have, by index, and why. in_step: the routers are seen to have
    just these workers."""

    weights: WeightsPlan
    operations: OperationsPlan
    obstacles: Mapping[int, str]
    workers: RouterDesired
    in_step: bool


def _agree(
    observed: Observed,
    engines: tuple[EngineView, ...],
    states: Mapping[int, GroupState],
    revision: Revision,
    unregistered: frozenset[int],
    now: datetime,
) -> _Agreed:
    """The weights' next step and the routers' workers depend on each other: what is to be registered follows from
    the step, and some steps must wait until the routers have just that. So: the step that needs no router first, and
    the further one only when the routers are seen to have what it needs."""
    spec = observed.rollout.spec
    status = observed.rollout.status.weights
    generation = observed.rollout.metadata.generation
    releasing = {engine.index for engine in engines} if memory.wanted_released(spec) else set()
    taken = revision.drain | memory.turns(engines, spec)
    listed = router_reports.listed_in(router_reports.reports_of(observed))

    def with_routers(in_step: bool) -> _Agreed:
        step = weights.advance(engines, spec, status, generation, now, in_step)
        out_of_routers = unregistered if in_step else frozenset()
        ordered = operations.advance(observed.rollout, engines, step.status, out_of_routers, now)
        leaving = (taken - step.engaged) | releasing | ordered.resetting | step.parting
        max_lag = spec.staleness.max_version_lag
        obstacles = {
            engine.index: why
            for engine in engines
            if (why := routing.obstacle(engine, states[engine.index], step, max_lag, generation, leaving, listed))
        }
        chosen = [engine for engine in engines if engine.index not in obstacles]
        workers = routing.desired_workers(chosen, states, step)
        return _Agreed(step, ordered, obstacles, workers, router_reports.in_step(observed, workers))

    agreed = with_routers(False)
    return with_routers(True) if agreed.in_step else agreed


def _coming(engines: tuple[EngineView, ...], observed: Observed) -> frozenset[int]:
    """Engines that could serve and are on their way into the routers."""
    spec, told = observed.rollout.spec, observed.rollout.status.weights
    if told is None or memory.wanted_released(spec):
        return frozenset()
    registered = router_reports.registered(engines, observed)
    # The status may be late: what was decided is served before it tells so.
    decided = told.transaction.version if told.transaction and told.transaction.decision == "Commit" else told.version
    return frozenset(
        engine.index
        for engine in engines
        if engine.wanted
        and engine.healthy
        and not (engine.released or engine.void)
        and (engine.version == decided or is_allowed(told, engine.version, spec.staleness.max_version_lag))
        and engine.index not in registered
    )


def _router_behind(observed: Observed, stamp: str) -> str:
    rollout = observed.rollout
    child = observed.children.get(("Deployment", names.router_name(rollout.metadata.name)))
    applied = None if child is None else child.annotations.get(ANNOTATION_SPEC_HASH)
    if rollout.spec.router.external is None and applied not in (None, stamp):
        return "its Deployment is of an older spec"
    return revisions.router_behind(observed.router_pods, rollout.spec, stamp)


def _agents(
    observed: Observed,
    engines: tuple[EngineView, ...],
    states: Mapping[int, GroupState],
    revision: Revision,
    moved: WeightsPlan,
    residency: MemoryPlan,
    restarts: Mapping[int, str],
    ordered: OperationsPlan,
) -> dict[str, AgentDesired]:
    spec = observed.rollout.spec
    execution = Execution(ExecutionState(spec.execution.state), PauseMode(spec.execution.pause_mode))
    return {
        pod.uid: AgentDesired(
            lease_term=0,
            generation=observed.rollout.metadata.generation,
            boot=moved.boot,
            execution=execution,
            group=states[engine.index].assignment,
            move=moved.moves.get(engine.index),
            prepare=moved.prepares.get(engine.index),
            fellows=engine.fellows() if pod.rank == 0 else [],
            restart_engine=restarts.get(engine.index, ""),
            restart_drains=is_allowed(moved.status, engine.version, spec.staleness.max_version_lag),
            drain=(not engine.wanted and engine.index not in moved.engaged) or engine.index in revision.drain,
            launch=residency.launch,
            memory=residency.orders.get(engine.index),
            operations=ordered.asked.get(engine.index, []),
            hands_off=spec.control == "External",
            peer_key=observed.peer_key,
            open_door=spec.weights.source is not None and spec.weights.source.type == "External",
            expects_trainer=_expects_trainer(spec),
        )
        for engine in engines
        for pod in engine.pods.values()
        if _reachable(pod)
    }


def _expects_trainer(spec: Spec) -> bool:
    """One has sent weights, or the network policies let one in."""
    source = spec.weights.source
    return spec.control == "Operator" and (
        bool(spec.network.trainers) or (source is not None and source.type == "Distributed")
    )


def _restarts(engines: Iterable[EngineView], moved: WeightsPlan, free: frozenset[int]) -> dict[int, str]:
    """Start ids of engines to be ended for their weights now: one that is well may have requests until no router has
    it (free)."""
    ready = {engine.index for engine in engines if engine.index in free or not engine.healthy}
    return {index: start for index, start in moved.restarts.items() if index in ready}


def _reachable(pod: PodView) -> bool:
    return bool(pod.alive and pod.ip)


def _pod_deletes(states: Mapping[int, GroupState], revision: Revision) -> tuple[DeleteOrder, ...]:
    pods = {pod.uid: pod for state in states.values() for pod in state.deletes}
    pods |= {pod.uid: pod for pod in revision.deletes}
    return tuple(DeleteOrder("Pod", pod.name, pod.uid) for pod in pods.values())
