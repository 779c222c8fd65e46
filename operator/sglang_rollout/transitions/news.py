"""What people are told of a plan: what keeps engines from serving, and the events on the resource."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from ..api import names
from . import diagnosis, members
from .engines import EngineView
from .groups import GroupState
from .memory import MemoryPlan
from .observed import Observed
from .planned import DeleteOrder, EventNote
from .weight_steps import WeightsPlan


def problems(engines: tuple[EngineView, ...], moved: WeightsPlan) -> dict[int, str]:
    """Engines with something wrong, with a sentence for each."""
    found = {engine.index: diagnosis.engine_problem(engine) for engine in engines if engine.wanted}
    found |= {engine.index: f"engine {engine.name}: {engine.unlike}" for engine in engines if engine.unlike}
    for engine in engines:
        if engine.index in moved.stranded and not found.get(engine.index):
            found[engine.index] = diagnosis.stranded(engine, moved.status.version)
    return {index: problem for index, problem in found.items() if problem}


def lost(observed: Observed, now: datetime) -> dict[int, str]:
    """Engines with a pod that cannot end, with a sentence for each."""
    return {
        pod.engine: f"pod {pod.name} does not end: its node {pod.node} does not answer; another engine takes its place"
        for pod in members.lost_pods(observed.pods, now)
        if pod.engine is not None
    }


def events(
    observed: Observed,
    engines: tuple[EngineView, ...],
    states: Mapping[int, GroupState],
    residency: MemoryPlan,
    gone: Mapping[int, str],
    removed: tuple[DeleteOrder, ...],
) -> tuple[EventNote, ...]:
    """gone: what lost() says. removed: children that are to be deleted."""
    notes = [
        EventNote(
            "Normal", "EngineRestarting", f"engine {index} starts again with the flags that releasing memory needs"
        )
        for index in sorted(residency.restarts)
    ]
    replaced = {order.name for order in removed if order.kind == "StatefulSet"}
    fleet = observed.rollout.metadata.name
    notes += [
        EventNote("Warning", "EngineReplaced", text)
        for index, text in sorted(gone.items())
        if names.engine_name(fleet, index) in replaced
    ]
    notes += [
        EventNote("Warning", "PauseTurnedIntoRetract", f"engine {engine.name}: {engine.turned_pause}")
        for engine in engines
        if engine.turned_pause and engine.record.message != engine.turned_pause
    ]
    notes += [
        EventNote("Warning", "WeightsDiffer", f"engine {engine.name}: {engine.unlike}; it starts again")
        for engine in engines
        if engine.unlike and engine.unlike not in engine.record.message
    ]
    records = {record.name: record for record in observed.rollout.status.engines}
    for index, state in sorted(states.items()):
        name = names.engine_name(fleet, index)
        before = records.get(name)
        if state.deletes:
            notes.append(EventNote("Warning", "GroupRecreated", f"engine {name}: {state.message}"))
        if state.exhausted:
            notes.append(EventNote("Warning", "RestartBudgetExhausted", f"engine {name}: {state.message}"))
        if before is not None and before.incarnation and state.incarnation > before.incarnation:
            notes.append(EventNote("Normal", "EngineRestarted", f"engine {name} is incarnation {state.incarnation}"))
    return tuple(notes)
