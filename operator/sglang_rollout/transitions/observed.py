"""What a plan is made from: the resource, its children and what the pods themselves report, at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from ..api import SGLangRollout
from ..protocol.report import AgentReport
from ..protocol.routing import RouterReport
from ..resources.context import FleetContext


@dataclass(frozen=True)
class ContainerView:
    """The part of a containerStatus (init containers too) from which problems are told.

    waiting, waiting_message: state.waiting; exit_code, exit_reason, exit_message: of state.terminated, else of
    lastState.terminated (None: it never ended).
    """

    name: str
    running: bool = False
    ready: bool = False
    restarts: int = 0
    waiting: str = ""
    waiting_message: str = ""
    exit_code: int | None = None
    exit_reason: str = ""
    exit_message: str = ""


@dataclass(frozen=True)
class PodView:
    """A pod of the fleet.

    engine: index of its engine, None for a router's pod. spec_hash: the annotation planned.ANNOTATION_SPEC_HASH.
    gone_by: when a terminating pod's grace ends (deletionTimestamp).
    unschedulable: message of PodScheduled=False, else empty.
    """

    name: str
    uid: str
    engine: int | None
    rank: int = 0
    ip: str = ""
    node: str = ""
    phase: str = "Pending"
    ready: bool = False
    terminating: bool = False
    gone_by: datetime | None = None
    created: datetime | None = None
    spec_hash: str = ""
    unschedulable: str = ""
    containers: tuple[ContainerView, ...] = ()

    @property
    def alive(self) -> bool:
        """Neither on its way out nor finished."""
        return not self.terminating and self.phase not in ("Failed", "Succeeded")


@dataclass(frozen=True)
class ChildView:
    """A child as the API server has it. failure: message of a condition that says it cannot make pods
    (a Deployment's ReplicaFailure, a StatefulSet's FailedCreate event), else empty."""

    kind: str
    name: str
    uid: str
    owner_uid: str = ""
    terminating: bool = False
    annotations: Mapping[str, str] = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True)
class Observed:
    """agents, routers: last report of each pod by pod UID; absent: none yet, or none for too long (then
    silent[uid] says why). untold: router pods that may act on another order than the one that their report is of.
    external_router, external_untold: the same of a router that we do not run. parting: a sentence for each such router
    that was the fleet's before and may still have engines of it. peer_key: what agents are to show each other."""

    rollout: SGLangRollout
    context: FleetContext
    children: Mapping[tuple[str, str], ChildView] = field(default_factory=dict)
    pods: tuple[PodView, ...] = ()
    agents: Mapping[str, AgentReport] = field(default_factory=dict)
    routers: Mapping[str, RouterReport] = field(default_factory=dict)
    silent: Mapping[str, str] = field(default_factory=dict)
    untold: frozenset[str] = frozenset()
    external_router: RouterReport | None = None
    external_untold: bool = False
    parting: tuple[str, ...] = ()
    apply_errors: Mapping[tuple[str, str], str] = field(default_factory=dict)
    peer_key: str = ""

    @property
    def router_pods(self) -> tuple[PodView, ...]:
        return tuple(pod for pod in self.pods if pod.engine is None)
