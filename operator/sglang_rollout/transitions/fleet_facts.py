"""What the other parts of the plan found out about a fleet: what its status and conditions are told from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ..api import Spec, WeightsStatus
from ..api.status import ExecutionPhase
from .engines import EngineView
from .groups import GroupState
from .operations import OperationsPlan


@dataclass(frozen=True)
class FleetFacts:
    """What the other parts of the plan found out. obstacles: why the routers are not to have an engine, by its index;
    the others they are to have. registered: indexes of those that every router was seen to have. problems: by engine
    index. router_words: what routers that are behind say of it. keeps_dirty: weights.failurePolicy is KeepGated."""

    engines: tuple[EngineView, ...]
    groups: Mapping[int, GroupState]
    obstacles: Mapping[int, str]
    registered: frozenset[int]
    routers_in_step: bool
    weights: WeightsStatus
    router_behind: str = ""
    outdated: frozenset[int] = frozenset()
    problems: Mapping[int, str] = field(default_factory=dict)
    fleet_problems: tuple[str, ...] = ()
    spec_error: str = ""
    router_url: str = ""
    lost: Mapping[int, str] = field(default_factory=dict)
    lacking_flags: frozenset[int] = frozenset()
    router_words: tuple[str, ...] = ()
    keeps_dirty: bool = False
    ordered: OperationsPlan = field(default_factory=OperationsPlan)

    def is_routable(self, engine: EngineView) -> bool:
        return engine.index not in self.obstacles


def execution_phase(wanted: Collection[EngineView], spec: Spec, weights: WeightsStatus) -> ExecutionPhase:
    """Engines that do not serve do not count; a pause for a weight move is no change of the execution state. Under
    control External it is what the trainer has made it, and on the way to nothing else."""
    serving = [engine for engine in wanted if engine.serving]
    if spec.control == "External":
        return "Paused" if serving and all(engine.paused for engine in serving) else "Running"
    if spec.execution.state == "Paused":
        return "Paused" if all(engine.paused for engine in serving) else "Pausing"
    moving = weights.phase in ("Committing", "Verifying")
    return "Resuming" if any(engine.paused for engine in serving) and not moving else "Running"
