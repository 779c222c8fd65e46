"""The engines of a fleet as one value each: what is wanted, its pods, its record in status, its agents' reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from ..api import EngineStatus, names
from ..protocol.memory import LaunchOptions, MemoryTag
from ..protocol.pod import AGENT_PORT, address_of
from ..protocol.report import TURNED_INTO_RETRACT, AgentReport, EngineState, MoveReport
from ..protocol.weights import Step
from . import members
from .checksums import unlike
from .observed import ChildView, Observed, PodView
from .once import once


@dataclass(frozen=True, eq=False)
class EngineView:
    """pods: alive ones by rank. leaving: terminating or finished ones. reports: by rank, of alive pods only. unlike: a
    sentence on the checksum of its weights, where that differs from others' of the same version; empty: it does not.

    What follows from these is worked out once for each view, and views are compared by identity: a plan for hundreds
    of engines asks often."""

    index: int
    name: str
    nodes: int
    wanted: bool
    record: EngineStatus
    pods: Mapping[int, PodView] = field(default_factory=dict)
    leaving: tuple[PodView, ...] = ()
    reports: Mapping[int, AgentReport] = field(default_factory=dict)
    silent: tuple[str, ...] = ()
    unheard: bool = False
    statefulset: ChildView | None = None
    unlike: str = ""

    @once
    def complete(self) -> bool:
        """Every pod of the engine is there, alive and has an address."""
        return all(rank in self.pods and self.pods[rank].ip for rank in range(self.nodes))

    @once
    def pod_uids(self) -> tuple[str, ...]:
        return tuple(self.pods[rank].uid for rank in sorted(self.pods))

    @once
    def leader(self) -> AgentReport | None:
        """The report of rank 0, the only rank that serves HTTP."""
        return self.reports.get(0)

    @once
    def start_id(self) -> str:
        return self.leader.engine.start_id if self.leader else ""

    @once
    def serving(self) -> bool:
        """Every rank's engine process is up, as the agents see it."""
        return self.complete and all(
            rank in self.reports and self.reports[rank].engine.state is EngineState.SERVING
            for rank in range(self.nodes)
        )

    @once
    def answers(self) -> bool:
        """Requests that a router sends to it are served: also while it drains."""
        return self.leader is not None and self.leader.engine.state in (EngineState.SERVING, EngineState.STOPPING)

    @once
    def was_given(self) -> bool:
        """By the status, which may be told late: whether the routers were given this very process."""
        return self.record.routable and self.record.start_id == self.start_id

    @once
    def healthy(self) -> bool:
        """Serving, and nothing says that its weights or its scheduler are broken."""
        broken = self.dirty or self.unlike or (self.leader and self.leader.probe_failure)
        return self.serving and not broken

    @once
    def version(self) -> str:
        """Label read back from the engine; empty while it does not serve."""
        return self.leader.engine.weight_version if self.leader and self.serving else ""

    @once
    def root(self) -> str:
        """Digest of the manifest of what it holds; empty where it is not known."""
        return self.leader.engine.weights_root if self.leader and self.serving else ""

    @once
    def paused(self) -> bool:
        return bool(self.serving and self.leader and self.leader.engine.paused)

    @once
    def turned_pause(self) -> str:
        """Its agent's word that it is not paused in place any more, though that was asked for; else empty."""
        said = self.leader.message if self.paused and self.leader else ""
        return said if said.startswith(TURNED_INTO_RETRACT) else ""

    @once
    def launch(self) -> LaunchOptions:
        """Flags that its process was started with."""
        return self.leader.engine.launch if self.leader else LaunchOptions()

    @once
    def released(self) -> tuple[MemoryTag, ...]:
        return tuple(self.leader.engine.released) if self.leader else ()

    @once
    def void(self) -> str:
        """Why it holds no weights at all; empty when it does."""
        return self.leader.engine.weights_void if self.leader else ""

    @once
    def movable(self) -> bool:
        """Whether other weights can be put into it now."""
        return self.healthy and MemoryTag.WEIGHTS not in self.released

    @once
    def dirty(self) -> bool:
        """Bytes of two versions may be mixed in it."""
        return any(report.move is not None and report.move.dirty for report in self.reports.values())

    @once
    def ready(self) -> bool:
        return self.complete and all(pod.ready for pod in self.pods.values())

    @once
    def staged(self) -> frozenset[str]:
        """Digests of the weights that the agents of all its pods hold in their stages."""
        held = [{kept.root for kept in report.stage.held} for report in self.reports.values()]
        return frozenset(set.union(*held)) if held else frozenset()

    @once
    def stage_problem(self) -> str:
        """Why weights cannot be staged on one of its pods; empty when they can."""
        return next((report.stage.problem for report in self.reports.values() if report.stage.problem), "")

    def keeps(self, root: str) -> list[str]:
        """host:port of its agents that hold these weights."""
        return [
            address_of(self.pods[rank].ip, AGENT_PORT)
            for rank, report in sorted(self.reports.items())
            if any(kept.root == root for kept in report.stage.held)
        ]

    def holds(self, root: str) -> bool:
        """Whether every one of its agents holds these weights."""
        return all(
            rank in self.reports and any(kept.root == root for kept in self.reports[rank].stage.held)
            for rank in range(self.nodes)
        )

    def fellows(self) -> list[str]:
        """host:port of the agents of its other pods than rank 0's."""
        return [address_of(pod.ip, AGENT_PORT) for rank, pod in sorted(self.pods.items()) if rank > 0 and pod.ip]

    def moves(self, move_id: str) -> tuple[MoveReport | None, ...]:
        """What each rank reports of this move, None where it has not heard of it."""
        if move_id not in self._moves:
            reports = [self.reports.get(rank) for rank in range(self.nodes)]
            moves = [None if report is None else report.move for report in reports]
            self._moves[move_id] = tuple(move if move is not None and move.id == move_id else None for move in moves)
        return self._moves[move_id]

    @once
    def _moves(self) -> dict[str, tuple[MoveReport | None, ...]]:
        return {}

    def progress(self, move_id: str) -> Step:
        """How far the whole engine has come in this move: its slowest rank while preparing; after that rank 0
        alone acts for all ranks."""
        slowest: Step | None = None
        moves = self.moves(move_id)
        for move in moves:
            if move is None:
                return Step.NONE
            if slowest is None or move.reached < slowest:
                slowest = move.reached
        if slowest is None:
            return Step.NONE
        leader = moves[0]
        assert leader is not None
        return slowest if slowest < Step.PREPARE else leader.reached

    def move_error(self, move_id: str) -> str:
        """Why this move does not go on, naming the pod; empty: nothing is wrong."""
        for rank, move in enumerate(self.moves(move_id)):
            if move is not None and (move.error or move.aborted):
                return f"pod {self.pods[rank].name}: {move.error or 'the move was given up'}"
        return ""

    def has_failed(self, order_id: str) -> bool:
        """Whether a pod of it has not got the weights of this move, or of this order to stage ahead."""
        told = (move for report in self.reports.values() for move in (report.move, report.prepare))
        return any(move is not None and move.id == order_id and move.error for move in told)

    def roots(self, move_id: str) -> frozenset[str]:
        """Digests of what its pods have staged for this move."""
        return frozenset(move.root for move in self.moves(move_id) if move is not None and move.root)

    def move_refused(self, move_id: str) -> bool:
        return any(move is not None and move.refused for move in self.moves(move_id))


def view_engines(observed: Observed, now: datetime) -> tuple[EngineView, ...]:
    """Every engine that is wanted, exists, or still has pods, by index."""
    fleet = observed.rollout.metadata.name
    records = {record.name: record for record in observed.rollout.status.engines}
    by_index: dict[int, list[PodView]] = {}
    for pod in observed.pods:
        if pod.engine is not None:
            by_index.setdefault(pod.engine, []).append(pod)
    existing = {
        int(name.removeprefix(f"{fleet}-e"))
        for kind, name in observed.children
        if kind == "StatefulSet" and name.removeprefix(f"{fleet}-e").isdecimal()
    }
    lost = {pod.engine for pod in members.lost_pods(observed.pods, now) if pod.engine is not None}
    wanted = members.choose(observed.rollout.spec.replicas, existing, lost)
    indexes = sorted(wanted | existing | set(by_index))
    odd = _unlike(observed)
    return tuple(_view(observed, index, index in wanted, by_index.get(index, []), records, odd) for index in indexes)


def _unlike(observed: Observed) -> dict[str, str]:
    """By UID of rank 0's pod: that its engine's checksum is not that of most. Only engines that were asked to verify
    their weights have one."""
    reports = {uid: report.engine for uid, report in observed.agents.items() if report.engine.weights_checksum}
    sums = {uid: ((one.weight_version, one.weights_sharding), one.weights_checksum) for uid, one in reports.items()}
    return {uid: f"its weights have {why}" for uid, why in unlike(sums).items()}


def _view(
    observed: Observed,
    index: int,
    wanted: bool,
    pods: list[PodView],
    records: Mapping[str, EngineStatus],
    odd: Mapping[str, str],
) -> EngineView:
    name = names.engine_name(observed.rollout.metadata.name, index)
    alive = {pod.rank: pod for pod in pods if pod.alive}
    reports = {rank: observed.agents[pod.uid] for rank, pod in alive.items() if pod.uid in observed.agents}
    silent = tuple(
        f"pod {pod.name}: {observed.silent[pod.uid]}" for pod in alive.values() if pod.uid in observed.silent
    )
    unheard = any(pod.uid not in observed.agents and pod.uid not in observed.silent for pod in alive.values())
    return EngineView(
        index=index,
        name=name,
        nodes=observed.rollout.spec.engine.nodes,
        wanted=wanted,
        record=records.get(name) or EngineStatus(name=name),
        pods=alive,
        leaving=tuple(pod for pod in pods if not pod.alive),
        reports=reports,
        silent=silent,
        unheard=unheard,
        statefulset=observed.children.get(("StatefulSet", name)),
        unlike=odd.get(alive[0].uid, "") if odd and 0 in alive else "",
    )
