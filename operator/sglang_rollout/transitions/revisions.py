"""Pods follow the parts of spec that they are made from, a few engines at a time.

An engine's template is frozen until its turn comes: then its StatefulSet gets the new template (which restarts
nothing by itself, the strategy is OnDelete) and its pods are deleted together. Engines that serve nothing go first
and cost no turn, so a broken revision is left behind as soon as a better one is there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass, replace

from ..api import Spec
from .engines import EngineView
from .observed import PodView
from .planned import ANNOTATION_SPEC_HASH


def spec_hash(spec: Spec) -> str:
    """Hash of what an engine's pods are made from. Not in it: what changes at run time (execution, weights), and
    model.path, which is where weights come from and no part of the template."""
    parts = {
        "engine": spec.engine.to_object(),
        "agent": spec.agent.to_object(),
        "model": {**spec.model.to_object(), "path": None},
        "scheduling": spec.scheduling.to_object(),
        "network": {"hostNetwork": spec.network.host_network},
        "restart": spec.restart.request_id if spec.restart else None,
    }
    return _hash(parts)


def router_hash(spec: Spec) -> str:
    """Hash of what a router's pods are made from."""
    return _hash({**spec.router.to_object(), "replicas": None})


def router_behind(pods: Collection[PodView], spec: Spec, wanted_hash: str) -> str:
    """What keeps the router's pods from being those of the present spec, whose router_hash is `wanted_hash`; empty:
    nothing. pods: of the router. The Deployment replaces them by itself."""
    if spec.router.external is not None:
        return "pods of the operator's own router are still ending" if pods else ""
    alive = [pod for pod in pods if pod.alive]
    old = sum(1 for pod in alive if pod.spec_hash not in ("", wanted_hash))
    if old:
        return f"{old} router pods are of an older spec"
    ready = sum(1 for pod in alive if pod.ready)
    return f"{ready} of {spec.router.replicas} router pods are ready" if ready < spec.router.replicas else ""


def _hash(parts: object) -> str:
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Revision:
    """render: engines whose StatefulSet is to be applied with the present template. drain: engines that leave the
    router because their pods are about to be replaced. deletes: pods to replace now. outdated: engines that still
    have their turn to come or to end."""

    render: frozenset[int]
    drain: frozenset[int]
    deletes: tuple[PodView, ...]
    outdated: frozenset[int]

    def without(self, engaged: frozenset[int]) -> Revision:
        """The same, but these engines keep their pods for now."""
        deletes = tuple(pod for pod in self.deletes if pod.engine not in engaged)
        return replace(self, drain=self.drain - engaged, deletes=deletes)


def advance(
    engines: Collection[EngineView],
    wanted_hash: str,
    max_unavailable: int,
    unregistered: frozenset[int],
    coming: Collection[int],
) -> Revision:
    """Which engines move to the present template now. unregistered: engines that no router has any more. coming: that
    could serve and that a router does not have yet: they are away, too."""
    wanted = [engine for engine in engines if engine.wanted]
    outdated = [engine for engine in wanted if engine.statefulset is None or _is_outdated(engine, wanted_hash)]
    away = {engine.index for engine in wanted if not engine.healthy or engine.index in coming}
    turns = max_unavailable - len(away)
    moving: list[EngineView] = []
    # Engines whose turn has begun already, then those that serve nothing, then the rest by index.
    for engine in sorted(outdated, key=lambda e: (not _has_begun(e, wanted_hash), e.healthy, e.index)):
        free = not engine.healthy or _has_begun(engine, wanted_hash)
        if free or turns > 0:
            turns -= 0 if engine.index in away else 1
            moving.append(engine)
    return Revision(
        render=frozenset(engine.index for engine in moving),
        drain=frozenset(engine.index for engine in moving if engine.pods),
        deletes=tuple(
            pod
            for engine in moving
            if _has_begun(engine, wanted_hash) and (engine.index in unregistered or not engine.answers)
            for pod in engine.pods.values()
            if pod.spec_hash != wanted_hash
        ),
        outdated=frozenset(engine.index for engine in outdated),
    )


def _is_outdated(engine: EngineView, wanted_hash: str) -> bool:
    return not _has_begun(engine, wanted_hash) or any(pod.spec_hash != wanted_hash for pod in engine.pods.values())


def _has_begun(engine: EngineView, wanted_hash: str) -> bool:
    return engine.statefulset is not None and engine.statefulset.annotations.get(ANNOTATION_SPEC_HASH) == wanted_hash
