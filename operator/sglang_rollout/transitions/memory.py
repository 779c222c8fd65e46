"""What the engines keep in GPU memory: released only when no router has them, and only by processes that can.

Releasing needs flags that an engine process gets at its start. A spec that asks for it on engines started without
them restarts those first, as many at once as may be away; flags once given stay, so that going back and forth costs
one restart and not one each time. Weights that were released without a backup are gone: such an engine is not
routable until it has loaded the committed version again (weights, a catch-up).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from ..api import Spec
from ..protocol.memory import LaunchOptions, MemoryOrder, MemoryTag
from ..resources.launch_flags import needed_flags
from .engines import EngineView


@dataclass(frozen=True)
class MemoryPlan:
    """launch: flags for engines that start from now on. orders: by engine index. restarts: start ids of engines that
    lack flags, whose turn it is, and that have left the routers. lacking: all that lack flags."""

    launch: LaunchOptions
    orders: dict[int, MemoryOrder] = field(default_factory=dict)
    restarts: dict[int, str] = field(default_factory=dict)
    lacking: frozenset[int] = frozenset()

    def without(self, engaged: frozenset[int]) -> MemoryPlan:
        """The same, but these engines keep their memory and their processes for now."""
        return replace(
            self,
            orders={index: order for index, order in self.orders.items() if index not in engaged},
            restarts={index: start for index, start in self.restarts.items() if index not in engaged},
        )


def wanted_released(spec: Spec) -> list[MemoryTag]:
    """The tags that spec wants released."""
    memory = spec.memory
    by_tag = {
        MemoryTag.WEIGHTS: memory.weights,
        MemoryTag.KV_CACHE: memory.kv_cache,
        MemoryTag.CUDA_GRAPH: memory.cuda_graph,
    }
    return [tag for tag, residency in by_tag.items() if residency == "Released"]


def turns(engines: Collection[EngineView], spec: Spec) -> frozenset[int]:
    """Engines that lack flags and whose turn it is to start again: they leave the routers first."""
    if spec.control == "External":
        return frozenset()
    away = sum(1 for engine in engines if engine.wanted and not engine.healthy)
    free = max(spec.weights.update_strategy.max_unavailable - away, 0)
    return frozenset(engine.index for engine in _lacking(engines, spec)[:free])


def advance(engines: Collection[EngineView], spec: Spec, unregistered: frozenset[int]) -> MemoryPlan:
    """The next step. unregistered: engines that no router has."""
    if spec.control == "External":
        return MemoryPlan(_with_kept_flags(needed_flags(spec), _members(engines)))
    wanted = wanted_released(spec)
    members = _members(engines)
    lacking = _lacking(engines, spec)
    chosen = turns(engines, spec) & unregistered
    orders = {
        engine.index: MemoryOrder(released=wanted)
        for engine in members
        if engine not in lacking and (not wanted or engine.index in unregistered)
    }
    return MemoryPlan(
        launch=_with_kept_flags(needed_flags(spec), members),
        orders=orders,
        restarts={engine.index: engine.start_id for engine in lacking if engine.index in chosen},
        lacking=frozenset(engine.index for engine in lacking),
    )


def _members(engines: Collection[EngineView]) -> list[EngineView]:
    return [engine for engine in engines if engine.wanted and engine.serving]


def _lacking(engines: Collection[EngineView], spec: Spec) -> list[EngineView]:
    needed = needed_flags(spec)
    return [engine for engine in _members(engines) if not engine.launch.covers(needed)]


def _with_kept_flags(needed: LaunchOptions, members: Collection[EngineView]) -> LaunchOptions:
    return LaunchOptions(
        memory_saver=needed.memory_saver or any(engine.launch.memory_saver for engine in members),
        weights_backup=needed.weights_backup or any(engine.launch.weights_backup for engine in members),
    )
