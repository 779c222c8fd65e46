"""Children that a fleet has and no longer needs: engines beyond the wanted ones, and a router that is not ours to run
any more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..api import names
from .engines import EngineView
from .observed import ChildView, Observed
from .planned import DeleteOrder


def parting_engines(engines: Iterable[EngineView], free: frozenset[int], observed: Observed) -> tuple[DeleteOrder, ...]:
    """Engines that are not wanted, once nobody counts on them (free); their pods drain as they stop."""
    gone = [engine.name for engine in engines if not engine.wanted and engine.index in free]
    found = [observed.children.get((kind, name)) for name in gone for kind in ("StatefulSet", "Service")]
    return tuple(_delete(child) for child in found if child is not None and _is_ours(child, observed))


def unused_router(observed: Observed, manifests: Iterable[Mapping[str, Any]]) -> tuple[DeleteOrder, ...]:
    """What carries the router's name and is not planned: of a router that was replaced by an external one, or the
    budget of more replicas than there are now."""
    planned = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests}
    name = names.router_name(observed.rollout.metadata.name)
    return tuple(
        _delete(child)
        for key, child in sorted(observed.children.items())
        if child.name == name and key not in planned and _is_ours(child, observed)
    )


def _is_ours(child: ChildView, observed: Observed) -> bool:
    return child.owner_uid == observed.rollout.metadata.uid and not child.terminating


def _delete(child: ChildView) -> DeleteOrder:
    return DeleteOrder(child.kind, child.name, child.uid)
