"""The fleet's conditions: Ready is the summary, each of the others one aspect, all told from the same facts."""

from __future__ import annotations

from datetime import datetime

from ..api import Condition, ConditionType, SGLangRollout, Spec, WeightsStatus, unsupported_fields, with_condition
from ..api.support import REASON as NOT_IMPLEMENTED
from ..api.support import unsupported_message
from .engine_status import KEPT_AS_IT_IS, engine_message
from .engines import EngineView
from .fleet_facts import FleetFacts, execution_phase
from .memory import wanted_released
from .routing import version_lag


def conditions(rollout: SGLangRollout, facts: FleetFacts, now: datetime) -> tuple[Condition, ...]:
    told = rollout.status.conditions
    for kind, (status, reason, message) in {
        ConditionType.READY: _ready(rollout, facts),
        ConditionType.AVAILABLE: _available(facts),
        ConditionType.PROGRESSING: _progressing(rollout, facts),
        ConditionType.DEGRADED: _degraded_or_lost(rollout, facts),
        ConditionType.PAUSED: _paused(rollout, facts),
        ConditionType.WEIGHTS_CONSISTENT: _weights_consistent(facts),
        ConditionType.ROUTER_SYNCED: _router_synced(facts),
        ConditionType.STALENESS_WITHIN_BOUND: _staleness(rollout, facts),
    }.items():
        told = with_condition(told, kind, status, reason, message, generation=rollout.metadata.generation, now=now)
    return told


Verdict = tuple[bool, str, str]


def _ready(rollout: SGLangRollout, facts: FleetFacts) -> Verdict:
    degraded, reason, message = _degraded(rollout, facts)
    if degraded:
        return False, reason, message
    progressing, reason, message = _progressing(rollout, facts)
    if progressing:
        return False, reason, message
    if released := wanted_released(rollout.spec):
        return True, "MemoryReleased", f"all engines have released {', '.join(released)}, as asked"
    if rollout.spec.control == "External":
        return _ready_for_trainer(rollout, facts)
    if rollout.spec.execution.state == "Paused":
        return True, "Paused", f"all {rollout.spec.replicas} engines are paused, as asked; requests wait"
    return True, "AllRoutable", f"all {rollout.spec.replicas} engines serve version {facts.weights.version}"


def _ready_for_trainer(rollout: SGLangRollout, facts: FleetFacts) -> Verdict:
    """The fleet is what the trainer has made it."""
    wanted = [engine for engine in facts.engines if engine.wanted]
    away = [engine.name for engine in wanted if _given_away(engine, rollout.spec)]
    if away:
        return True, "MemoryReleased", f"the trainer has released memory of {', '.join(away)}"
    if wanted and execution_phase(wanted, rollout.spec, facts.weights) == "Paused":
        return True, "Paused", f"the trainer has paused all {len(wanted)} engines; requests wait"
    return True, "AllRoutable", f"all {len(wanted)} engines serve version {facts.weights.version}"


def _given_away(engine: EngineView, spec: Spec) -> bool:
    """The trainer has released memory of it: it is not on its way into the routers."""
    return spec.control == "External" and engine.serving and bool(engine.released)


def _available(facts: FleetFacts) -> Verdict:
    if facts.registered:
        return True, "EnginesRoutable", f"{len(facts.registered)} engines are in the router"
    return False, "NoEngineRoutable", _first_reason(facts) or "no engine is in the router yet"


def _progressing(rollout: SGLangRollout, facts: FleetFacts) -> Verdict:
    spec = rollout.spec
    wanted = [engine for engine in facts.engines if engine.wanted]
    if facts.weights.phase in ("Staging", "Prepared", "Committing", "Verifying"):
        detail = move_detail(facts.weights, len(wanted))
        return True, "WeightsMoving", f"moving to version {facts.weights.target_version}{detail}"
    if facts.weights.version != facts.weights.target_version and facts.weights.phase != "Failed":
        return True, "WeightsMoving", f"moving to version {facts.weights.target_version}"
    extra = [engine.name for engine in facts.engines if not engine.wanted and engine.index not in facts.lost]
    if extra:
        return True, "ScalingDown", f"removing {', '.join(extra)}"
    if facts.outdated:
        listed = ", ".join(engine.name for engine in wanted if engine.index in facts.outdated)
        return True, "ReplacingPods", f"pods of an older spec are replaced in turn: {listed}"
    if facts.lacking_flags:
        listed = ", ".join(engine.name for engine in wanted if engine.index in facts.lacking_flags)
        return True, "RestartingForMemoryRelease", f"releasing memory needs launch flags: {listed} start again in turn"
    released = wanted_released(spec)
    other = [engine for engine in wanted if set(engine.released) != set(released) or not engine.serving]
    if released and other:
        text = f"{len(wanted) - len(other)} of {len(wanted)} engines have released {', '.join(released)}"
        return True, "ReleasingMemory", text
    missing = [] if released else [e for e in wanted if e.index not in facts.registered and not _given_away(e, spec)]
    if missing:
        message = f"{len(wanted) - len(missing)} of {spec.replicas} engines are in the router; "
        first = missing[0]
        text = engine_message(first, facts.groups[first.index], facts) or "waiting for the router"
        return True, "EnginesStarting", f"{message}{first.name}: {text}"
    phase = execution_phase(wanted, spec, facts.weights)
    if phase in ("Pausing", "Resuming"):
        behind = sum(1 for engine in wanted if engine.paused != (spec.execution.state == "Paused"))
        return True, phase, f"{behind} of {len(wanted)} engines are not {spec.execution.state} yet"
    if any(report.generation < rollout.metadata.generation for e in wanted for report in e.reports.values()):
        return True, "AgentsBehind", "agents have not heard of the present spec yet"
    if facts.router_behind:
        return True, "RouterStarting", f"the router is not as spec asks for: {facts.router_behind}"
    if not facts.routers_in_step:
        return True, "RouterBehind", _routers_are_behind(facts)
    # An engine that is out of the routers on purpose (its memory is released) is not ready on purpose, too.
    if unready := [engine.name for engine in wanted if engine.index in facts.registered and not engine.ready]:
        return True, "PodsNotReady", f"the kubelet has not found every pod of {', '.join(unready)} ready yet"
    return False, "Settled", "the fleet is what spec asks for"


def move_detail(weights: WeightsStatus, engines: int) -> str:
    """How far an open move is, to be put behind its name."""
    move = weights.transaction
    if move is None:
        return ""
    if weights.phase == "Staging" and move.of_bytes:
        return f", {move.staged_bytes / 1e9:.1f} of {move.of_bytes / 1e9:.1f} GB are staged on every engine"
    return f", {move.committed} of {engines} engines are there"


def _degraded(rollout: SGLangRollout, facts: FleetFacts) -> Verdict:
    if facts.spec_error:
        return True, "UnusableSpec", facts.spec_error
    if facts.fleet_problems:
        return True, "ChildrenFailing", "; ".join(facts.fleet_problems)
    exhausted = [engine for engine in facts.engines if facts.groups[engine.index].exhausted]
    if exhausted:
        first = exhausted[0]
        return True, "RestartBudgetExhausted", f"{first.name}: {facts.groups[first.index].message}"
    if facts.problems:
        listed = "; ".join(facts.problems[index] for index in sorted(facts.problems))
        return True, "EngineFailing", listed
    transaction = facts.weights.transaction
    if facts.weights.phase == "Failed" and transaction is not None:
        serving = f"version {facts.weights.version} keeps serving"
        return True, "WeightsRefused", f"version {transaction.version}: {transaction.message}; {serving}"
    if unsupported := unsupported_fields(rollout.spec):
        return True, NOT_IMPLEMENTED, unsupported_message(unsupported)
    dirty = [engine.name for engine in facts.engines if engine.dirty]
    if dirty:
        kept = KEPT_AS_IT_IS if facts.keeps_dirty else ""
        return True, "EngineDirty", f"a weight move failed half way on {', '.join(dirty)}; not routable{kept}"
    return False, "NoProblem", "nothing is known to be wrong"


def _degraded_or_lost(rollout: SGLangRollout, facts: FleetFacts) -> Verdict:
    """A pod that cannot end is told, but its engine has been replaced: the fleet is Ready without it."""
    verdict = _degraded(rollout, facts)
    if not verdict[0] and facts.lost:
        return True, "PodNotEnding", "; ".join(facts.lost[index] for index in sorted(facts.lost))
    return verdict


def _paused(rollout: SGLangRollout, facts: FleetFacts) -> Verdict:
    serving = [engine for engine in facts.engines if engine.wanted and engine.serving]
    paused = sum(1 for engine in serving if engine.paused)
    asked = rollout.spec.execution.state == "Paused" or (rollout.spec.control == "External" and paused > 0)
    if asked and paused == len(serving):
        return True, "Paused", f"all {paused} engines that are up are paused"
    return False, "Running" if paused == 0 else "PartlyPaused", f"{paused} of {len(serving)} engines are paused"


def _weights_consistent(facts: FleetFacts) -> Verdict:
    serving = [engine for engine in facts.engines if engine.wanted and engine.serving]
    other = sorted({engine.version for engine in serving if engine.version} - {facts.weights.version})
    if other:
        return False, "MixedVersions", f"some engines are at {', '.join(other)}, not at {facts.weights.version}"
    if facts.weights.version != facts.weights.target_version:
        return False, "TargetNotReached", f"at {facts.weights.version}, target {facts.weights.target_version}"
    return True, "OneVersion", f"every engine that is up is at version {facts.weights.version}"


def _router_synced(facts: FleetFacts) -> Verdict:
    if facts.routers_in_step:
        routable = sum(1 for engine in facts.engines if facts.is_routable(engine))
        return True, "InStep", f"every router has exactly the {routable} routable engines"
    return False, "Behind", _routers_are_behind(facts)


def _routers_are_behind(facts: FleetFacts) -> str:
    words = f": {'; '.join(facts.router_words)}" if facts.router_words else ""
    return f"a router does not have exactly the routable engines yet{words}"


def _staleness(rollout: SGLangRollout, facts: FleetFacts) -> Verdict:
    lag = version_lag(facts.weights, (e for e in facts.engines if e.index in facts.registered))
    bound = rollout.spec.staleness.max_version_lag
    text = f"the routable engine furthest behind is {lag} versions behind; {bound} are allowed"
    return lag <= bound, "WithinBound" if lag <= bound else "TooFarBehind", text


def _first_reason(facts: FleetFacts) -> str:
    for engine in facts.engines:
        if engine.wanted and (problem := facts.problems.get(engine.index)):
            return problem
    return ""
