"""A plan: everything that the executor may do, with no decision left to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..api import Status
from ..protocol.desired import AgentDesired
from ..protocol.routing import RouterDesired
from .once import once

# Hash of the parts of spec that an engine's pods are made from; on StatefulSets and on their pods. Pods of another
# hash are of an older spec and are replaced in turn; a new operator that renders the same spec in another way
# replaces none.
ANNOTATION_SPEC_HASH = "rollout.sglang.io/spec-hash"


@dataclass(frozen=True)
class DeleteOrder:
    """Delete this object if it still has this UID. Pods: with their own grace period."""

    kind: str
    name: str
    uid: str


@dataclass(frozen=True)
class EventNote:
    """A Kubernetes event on the resource."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True)
class Rest:
    """What of a plan no engine waits for. applies: whole manifests, for server-side apply. status: whole; the executor
    leaves it when it is equal to what is there."""

    status: Status
    applies: tuple[Mapping[str, Any], ...] = ()
    deletes: tuple[DeleteOrder, ...] = ()
    events: tuple[EventNote, ...] = ()


@dataclass(frozen=True)
class Plan:
    """agents, routers: desired state by pod UID; lease_term in them is filled in by the executor. external_router: the
    workers that the router we do not run must have.

    left_out: engines that no router is to have, by name, with the reason.

    decision: the status holds what must not be lost or overtaken by what follows from it: it is written first, with the
    resourceVersion that it was planned from, and nothing else is done when that fails.
    requeue_after: seconds until the clock alone can change the plan.
    work_out_rest: engines may stand still until they have their orders, so the rest is worked out when it is first
    asked for. Known without it: phase, of the weights in the status, and has_news, whether that must be told at once.
    """

    work_out_rest: Callable[[], Rest]
    phase: str = ""
    has_news: bool = False
    agents: Mapping[str, AgentDesired] = field(default_factory=dict)
    routers: Mapping[str, RouterDesired] = field(default_factory=dict)
    external_router: RouterDesired | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    decision: bool = False
    requeue_after: float | None = None

    @once
    def _rest(self) -> Rest:
        return self.work_out_rest()

    @property
    def status(self) -> Status:
        return self._rest.status

    @property
    def applies(self) -> tuple[Mapping[str, Any], ...]:
        return self._rest.applies

    @property
    def deletes(self) -> tuple[DeleteOrder, ...]:
        return self._rest.deletes

    @property
    def events(self) -> tuple[EventNote, ...]:
        return self._rest.events


def soonest(*waits: float | None) -> float | None:
    """The shortest of some waits in seconds; None: none of them ends by itself."""
    return min((wait for wait in waits if wait is not None), default=None)
