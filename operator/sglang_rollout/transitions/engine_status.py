"""What is told of one engine: its part of the status, and the sentence that says what it waits for."""

from __future__ import annotations

from ..api import EngineStatus
from ..api.conditions import shorten
from ..protocol.pod import AGENT_PORT, ENGINE_PORT
from .engines import EngineView
from .fleet_facts import FleetFacts
from .groups import GroupState

# What a person can do about an engine that failurePolicy KeepGated keeps.
KEPT_AS_IT_IS = (
    "; weights.failurePolicy KeepGated keeps it as it is: move the fleet to another weights.version, which it loads as"
    " well, or delete its pods, or set RestartEngine"
)


def engine_status(engine: EngineView, facts: FleetFacts) -> EngineStatus:
    group = facts.groups[engine.index]
    rank0 = engine.pods.get(0)
    return EngineStatus(
        name=engine.name,
        address=f"{rank0.ip}:{ENGINE_PORT}" if rank0 and rank0.ip else "",
        agent=f"{rank0.ip}:{AGENT_PORT}" if rank0 and rank0.ip else "",
        incarnation=group.incarnation,
        pod_uids=group.pod_uids,
        start_id=group.start_id,
        ready=engine.ready,
        routable=facts.is_routable(engine),
        paused=engine.paused,
        released=tuple(tag.value for tag in engine.released),
        weight_version=engine.version,
        restarts=group.restarts,
        restarted_at=group.restarted_at,
        message=shorten(engine_message(engine, group, facts), 1024),
    )


def engine_message(engine: EngineView, group: GroupState, facts: FleetFacts) -> str:
    """What it waits for or why it is not routable."""
    if facts.is_routable(engine):
        return engine.turned_pause
    if lost := facts.lost.get(engine.index):
        return lost
    if not engine.wanted:
        return "being removed: its requests end first"
    if problem := facts.problems.get(engine.index):
        return problem
    if engine.index in facts.outdated and not group.message:
        return "waiting for pods of the present spec"
    if group.message:
        return group.message
    if engine.released:
        return f"released {', '.join(engine.released)}"
    if engine.void:
        return f"holds no weights ({engine.void}) until it has loaded version {facts.weights.version}"
    if engine.dirty:
        return f"a weight move failed half way: it serves nothing before it has whole weights again{_kept(facts)}"
    for report in engine.reports.values():
        if report.move is not None and report.move.error:
            return report.move.error
    if engine.serving and engine.version != facts.weights.version:
        held = f"at version {engine.version}, " if engine.version else ""  # an apply takes the label away
        return f"{held}moving to {facts.weights.version}"
    said = [report.message for report in engine.reports.values() if report.message]
    return said[0] if said else "starting again" if engine.record.incarnation > 1 else "starting"


def _kept(facts: FleetFacts) -> str:
    return KEPT_AS_IT_IS if facts.keeps_dirty else ""
