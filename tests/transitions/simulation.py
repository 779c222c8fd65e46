"""A fleet in memory that follows the rules of the real one, slowly and out of order: Kubernetes, agents, engines and
routers move one small step at a time, reports are delivered late, and every part can die between two steps.

It knows what no observer knows: which engine process serves which bytes to whom. `serving()` is that truth.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from sglang_rollout.api import SGLangRollout, WeightsStatus, names
from sglang_rollout.controller.status_writes import STILL_SECONDS, may_wait, only_orders_count
from sglang_rollout.protocol.desired import AgentDesired, ExecutionState, GroupAssignment
from sglang_rollout.protocol.fleet import Trust
from sglang_rollout.protocol.memory import LaunchOptions, MemoryTag
from sglang_rollout.protocol.operations import OperationKind, OperationReport, OperationResult
from sglang_rollout.protocol.report import (
    AgentReport,
    EngineReport,
    EngineState,
    MoveReport,
    StagedWeights,
    StageReport,
)
from sglang_rollout.protocol.routing import RegisteredWorker, RouterDesired, RouterReport, Worker
from sglang_rollout.protocol.weights import SourceKind, Step, Verify, WeightMove, WeightVersion
from sglang_rollout.resources import FleetContext
from sglang_rollout.transitions import router_reports
from sglang_rollout.transitions.ahead import order_id
from sglang_rollout.transitions.engines import view_engines
from sglang_rollout.transitions.observed import ChildView, Observed, PodView
from sglang_rollout.transitions.plan import plan
from sglang_rollout.transitions.planned import ANNOTATION_SPEC_HASH, Plan

CONTEXT = FleetContext(
    operator_namespace="system",
    operator_pod_labels={"app": "operator"},
    agent_image="agent:1",
    router_image="router:1",
    trust=Trust("sglang-rollout:u1", "https://issuer", ["system:serviceaccount:system:operator"]),
)
START = datetime(2026, 1, 1, tzinfo=UTC)


def rollout_object(**spec: Any) -> dict[str, Any]:
    """A small valid resource; `spec` replaces whole top-level fields."""
    return {
        "apiVersion": "rollout.sglang.io/v1alpha1",
        "kind": "SGLangRollout",
        "metadata": {"name": "f", "namespace": "ns", "uid": "u1", "generation": 1, "resourceVersion": "1"},
        "spec": {
            "replicas": 2,
            "model": {"path": "/models/v1"},
            "engine": {"image": "sglang:1"},
            **spec,
        },
    }


@dataclass
class SimEngine:
    """One engine process and the agent of its rank 0."""

    start_id: str
    bytes_version: str
    state: EngineState = EngineState.STARTING
    paused: bool = False
    mixed: bool = False
    launch: LaunchOptions = field(default_factory=LaunchOptions)
    released: list[MemoryTag] = field(default_factory=list)
    void: str = ""
    operations: dict[str, OperationReport] = field(default_factory=dict)
    asked: dict[str, str] = field(default_factory=dict)  # ids; another of its kind makes it forget the last
    applied_root: str = ""  # of what was put in last; what it has read by itself has the root of its label
    checksum: str = ""
    wrong: bool = False  # and nobody but the checksum tells
    joined: GroupAssignment | None = None  # of an engine of several pods: those that it started with

    @property
    def root(self) -> str:
        """What its bytes are, whatever they are called."""
        return self.applied_root if label_of(self.applied_root) == self.bytes_version else root_of(self.bytes_version)

    @property
    def unfit(self) -> bool:
        """It stays paused whatever is asked: it could only generate nonsense."""
        return bool(self.released or self.void)

    @property
    def key(self) -> str:
        return f"key-{self.start_id}"


@dataclass
class SimPod:
    name: str
    uid: str
    ip: str
    engine_index: int | None
    rank: int
    spec_hash: str
    terminating: bool = False
    gone_by: datetime | None = None
    unreachable: bool = False  # its node: the engine and its connections to the routers may still live
    cut: bool = False  # from the operator alone: it goes on as it was told last
    agent_start: int = 0
    orders: AgentDesired | None = None  # what the operator wants it to hear; `desired`: what it has heard
    router_orders: RouterDesired | None = None
    order: int = 0  # number of router_orders; heard_order, answered_order: of what it has heard, and reported of
    heard_order: int = 0
    answered_order: int = 0
    desired: AgentDesired | None = None
    engine: SimEngine | None = None
    move: MoveReport | None = None
    ahead: MoveReport | None = None
    stage: list[str] = field(default_factory=list)  # roots, the newest last; outlives engine and agent
    router_desired: RouterDesired | None = None
    router_workers: dict[str, Worker] = field(default_factory=dict)
    router_pending: dict[str, Worker] = field(default_factory=dict)  # taken in, not listed and not used yet
    router_down: bool = False  # its sidecar is there and says so

    @property
    def takes_orders(self) -> bool:
        return not (self.cut or self.unreachable)


class Simulation:
    """tick() lets one part move; reconcile() plans and executes as the operator does."""

    def __init__(self, **spec: Any) -> None:
        self.object = rollout_object(**spec)
        self.now = START
        self.status_written = START - timedelta(days=1)
        self.rest_done = START - timedelta(days=1)
        self.numbers: Iterator[int] = itertools.count(1)
        self.stateful_sets: dict[str, dict[str, str]] = {}
        self.pods: dict[str, SimPod] = {}
        self.boot = WeightVersion("", "")
        self.boot_launch = LaunchOptions()
        self.delivered_agents: dict[str, AgentReport] = {}
        self.delivered_routers: dict[str, RouterReport] = {}
        self.silent: dict[str, str] = {}
        self.bad_paths: set[str] = set()
        self.break_next_apply = False
        self.trainers: set[str] = set()  # versions that a trainer is there to send
        self.takes: dict[str, int] = {}  # by version: which of its trainers is there; each has bytes of its own
        self.odd_sums: set[str] = set()  # names of pods whose next bytes go wrong on the way into the engine
        self.odd_pods: set[str] = set()  # names of pods that are given other bytes than the rest
        self.broken_stages: set[str] = set()  # names of pods in which nothing can be staged
        self.stage_slots = 1  # versions that fit into a pod's stage; 0: there is none
        self.cache_is_busy: Callable[[], bool] = lambda: False
        self.events: list[str] = []
        self.seen: set[tuple[str, str]] = set()  # labels that requests have seen, and what the bytes were
        self.done_operations: list[tuple[str, str]] = []
        self.last: Plan | None = None
        self.before_patch: dict[str, Any] | None = None  # the resource as an operator has it that heard of no patch yet
        self.routed: dict[str, Worker] = {}  # by engine: what the routers were ordered to have last
        self.doubted: set[str] = set()  # start ids of engines of which nobody can tell whether they are wrong
        self.written_moves: set[str] = set()  # ids that the status has told
        self.needless: list[str] = []  # engines that left the routers and could have stayed

    # --- the user ---

    def patch(self, **spec: Any) -> None:
        self.before_patch = self.before_patch or self.object
        self.object = {
            **self.object,
            "spec": {**self.object["spec"], **spec},
            "metadata": {**self.object["metadata"], "generation": self.object["metadata"]["generation"] + 1},
        }

    @property
    def rollout(self) -> SGLangRollout:
        return SGLangRollout.from_object(self.object)

    # --- the operator ---

    def observe(self, rollout: SGLangRollout | None = None) -> Observed:
        """rollout: the resource as it is known; without, as it is."""
        children = {
            ("StatefulSet", name): ChildView("StatefulSet", name, f"sts-{name}", "u1", annotations=annotations)
            for name, annotations in self.stateful_sets.items()
        }
        return Observed(
            rollout=rollout or self.rollout,
            context=CONTEXT,
            children=children,
            pods=tuple(self._pod_view(pod) for pod in self.pods.values()),
            agents={uid: report for uid, report in self.delivered_agents.items() if uid in self.pods},
            routers={uid: report for uid, report in self.delivered_routers.items() if uid in self.pods},
            silent={uid: why for uid, why in self.silent.items() if uid in self.pods},
            untold=frozenset(uid for uid, pod in self.pods.items() if pod.answered_order != pod.order),
        )

    def reconcile(self, status_write_fails: bool = False, late: bool = False) -> Plan:
        """status_write_fails: or whoever leads dies before it. late: a patch has not been heard of, so that what is
        planned goes out and the status does not, being of an older resource."""
        late = late and self.before_patch is not None
        known = SGLangRollout.from_object(self.before_patch) if late and self.before_patch else None
        self.before_patch = None
        step = plan(self.observe(known), self.now)
        self.last = step
        written = not (status_write_fails or late)
        if step.decision:
            # Written first: when that fails nothing else is done.
            if not written:
                return step
            self._write(step)
            self.rest_done = self.now
        orders_only = self._are_only_orders_due(step)
        if not orders_only:
            for manifest in step.applies:
                self._apply(manifest)
        for uid, desired in step.agents.items():
            if uid in self.pods:
                self.pods[uid].orders = desired
        for uid, routers in step.routers.items():
            if uid in self.pods and routers != self.pods[uid].router_orders:
                self.pods[uid].router_orders = routers
                self.pods[uid].order += 1
        self._note_doubted()
        self._look_for_unwritten(step)
        self._look_for_needless(step)
        if orders_only:
            self.events += [event.reason for event in step.events] if step.decision else []
            return step
        self.rest_done = self.now
        if not step.decision and self._is_due(step):
            if not written:
                return step
            self._write(step)
        self.events += [event.reason for event in step.events]
        for order in step.deletes:
            self._delete(order.kind, order.name, order.uid)
        return step

    def _note_doubted(self) -> None:
        if any(report.engine.weights_checksum for report in self.delivered_agents.values()):
            engines = view_engines(self.observe(), self.now)
            self.doubted |= {engine.start_id for engine in engines if "none is that of most" in engine.unlike}

    def _look_for_unwritten(self, step: Plan) -> None:
        """What a trainer sends once, by an id that whoever plans next would not know, would have to be sent again."""
        orders = [order for agent in step.agents.values() for order in (agent.move, agent.prepare) if order]
        told = {order.id for order in orders if not order.abort and not order.id.startswith("catch-up:")}
        assert told <= self.written_moves, f"{told - self.written_moves} is told to engines before it is written"

    def _look_for_needless(self, step: Plan) -> None:
        """An engine that leaves a router drains for seconds: none may that goes on as it is, or has come through."""
        if not step.routers:
            return
        ordered = {worker.engine: worker for routers in step.routers.values() for worker in routers.workers}
        processes = {pod.engine.key: pod for pod in self.pods.values() if pod.engine is not None and pod.rank == 0}
        for name, worker in self.routed.items():
            pod, why = processes.get(worker.api_key), step.left_out.get(name, "")
            if name in ordered or pod is None or pod.engine is None:
                continue
            # An operator that has lost what it ordered knows no better before a router says that it has done it.
            listed = router_reports.listed_in(self.delivered_routers.values())
            unheard = "has not heard" in why and (name, worker.incarnation) in listed
            through = step.status.weights is not None and step.status.weights.target_version == pod.engine.bytes_version
            if unheard or ("takes no part" in why and through and not pod.engine.paused):
                self.needless.append(f"{name}: {why}")
        self.routed = ordered

    def _write(self, step: Plan) -> None:
        self.object = {**self.object, "status": step.status.to_object()}
        if weights := step.status.weights:
            opened = weights.transaction
            ahead = weights.prepared
            self.written_moves |= {opened.id} if opened else set()
            self.written_moves |= {order_id(ahead)} if ahead else set()
        self.status_written = self.now

    def _are_only_orders_due(self, step: Plan) -> bool:
        told = self.rollout.status.weights
        still = only_orders_count(told.phase if told else "", step)
        return still and self.now - self.rest_done < timedelta(seconds=STILL_SECONDS)

    def _is_due(self, step: Plan) -> bool:
        """What changes with every engine is told late, as the executor does: plans are made from what was told."""
        before, after = self.rollout.status.to_object(), step.status.to_object()
        if before == after:
            return False
        wait = 0.0 if step.events else may_wait(before, after)
        return self.now - self.status_written >= timedelta(seconds=wait)

    def _apply(self, manifest: Any) -> None:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        if kind == "StatefulSet":
            self.stateful_sets[name] = dict(manifest["metadata"]["annotations"])
        if kind == "ConfigMap":
            self.boot = step_boot(manifest)
            flags = json.loads(manifest["data"]["fleet.json"])["launch"]
            self.boot_launch = LaunchOptions(flags["memorySaver"], flags["weightsBackup"])

    def _delete(self, kind: str, name: str, uid: str) -> None:
        if kind == "StatefulSet":
            self.stateful_sets.pop(name, None)
        if kind == "Pod" and uid in self.pods:
            self._terminate(self.pods[uid])

    def _terminate(self, pod: SimPod) -> None:
        if not pod.terminating:
            pod.terminating = True
            pod.gone_by = self.now + timedelta(seconds=60)

    # --- the world, one small step each ---

    def run_kubernetes(self, ends: Callable[[], bool] = lambda: True) -> None:
        """Terminating pods go, one by one as `ends` says, and missing pods come."""
        for uid, pod in list(self.pods.items()):
            orphan = pod.engine_index is not None and names.engine_name("f", pod.engine_index) not in self.stateful_sets
            if orphan and not pod.terminating:
                self._terminate(pod)
            if pod.terminating and not pod.unreachable and ends():
                del self.pods[uid]
        nodes = self.rollout.spec.engine.nodes
        for name, stamps in self.stateful_sets.items():
            index = int(name.removeprefix("f-e"))
            present = {pod.rank for pod in self.pods.values() if pod.engine_index == index}
            for rank in set(range(nodes)) - present:
                self._add_pod(f"{name}-{rank}", index, rank, stamps[ANNOTATION_SPEC_HASH])
        routers = [pod for pod in self.pods.values() if pod.engine_index is None]
        for _ in range(self.rollout.spec.router.replicas - len(routers)):
            self._add_pod(f"f-router-{next(self.numbers)}", None, 0, "")

    def _add_pod(self, name: str, index: int | None, rank: int, spec_hash: str) -> None:
        number = next(self.numbers)
        self.pods[f"p{number}"] = SimPod(name, f"p{number}", f"10.0.0.{number}", index, rank, spec_hash)

    def hear(self, uid: str) -> None:
        """The pod is told what the operator wants of it last; what was ordered before is refused if it comes later."""
        pod = self.pods.get(uid)
        if pod is not None and pod.takes_orders and (pod.engine_index is None or not pod.terminating):
            pod.desired, pod.router_desired, pod.heard_order = pod.orders, pod.router_orders, pod.order

    def run_pod(self, uid: str) -> None:
        pod = self.pods.get(uid)
        if pod is None or pod.unreachable:
            return
        if pod.engine_index is None:
            self._run_router(pod)
        elif not pod.terminating:
            self._run_engine(pod)
            self._run_move(pod)
            self._run_ahead(pod)

    def _run_router(self, pod: SimPod) -> None:
        """An addition is taken in now and done later; until then it cannot be taken back."""
        if pod.router_down:
            pod.router_down = False
            return
        pod.router_workers |= pod.router_pending
        pod.router_pending = {}
        if pod.router_desired is not None:
            wanted = {worker.url: worker for worker in pod.router_desired.workers}
            pod.router_workers = {url: wanted[url] for url in pod.router_workers if url in wanted}
            pod.router_pending = {url: worker for url, worker in wanted.items() if url not in pod.router_workers}

    def _run_engine(self, pod: SimPod) -> None:
        desired = pod.desired
        if pod.engine and desired and desired.restart_engine == pod.engine.start_id:
            doubted = pod.engine.start_id in self.doubted
            whole = not (pod.engine.mixed or pod.engine.unfit or pod.engine.wrong or doubted)
            assert not (whole and self._is_reachable(pod, pod.engine)), "what can serve ends when no router has it"
            self.kill_engine(pod.uid)
        group = desired.group if desired else None
        if pod.engine and pod.engine.joined and group and not pod.engine.joined.same_pods(group):
            self.kill_engine(pod.uid)
        nodes = self.rollout.spec.engine.nodes
        if pod.engine is None:
            if nodes > 1 and not self._rank0_confirms(pod):
                return
            boot = desired.boot if desired else self.boot
            launch = desired.launch if desired else self.boot_launch
            joined = desired.group if desired and nodes > 1 else None
            pod.engine = SimEngine(f"s{next(self.numbers)}", boot.version, launch=launch, joined=joined)
            pod.move = None
        elif pod.engine.state is EngineState.STARTING:
            pod.engine.state = EngineState.SERVING
        elif desired is not None and not desired.hands_off and not self._held(pod):
            pod.engine.paused = desired.execution.state is ExecutionState.PAUSED or pod.engine.unfit
            if pod.move is not None and pod.move.reached is Step.PAUSE and not pod.engine.paused:
                pod.move = replace(pod.move, reached=Step.PREPARE)
            if pod.rank == 0:
                self._run_memory(pod, pod.engine, desired)
                self._run_operations(pod, pod.engine, desired)

    def _run_memory(self, pod: SimPod, engine: SimEngine, desired: AgentDesired) -> None:
        order = desired.memory
        if order is None or set(order.released) == set(engine.released):
            return
        if set(order.released) - set(engine.released):
            assert engine.launch.memory_saver, "an engine without the flag cannot release"
            assert not self._is_reachable(pod, engine), "memory is released only when no router has the engine"
        engine.paused = True
        engine.released = list(order.released)
        if MemoryTag.WEIGHTS in order.released and not engine.launch.weights_backup:
            engine.void = f"released:{next(self.numbers)}"

    def _run_operations(self, pod: SimPod, engine: SimEngine, desired: AgentDesired) -> None:
        for operation in desired.operations:
            kind = operation.id.partition(":")[0]
            if (before := engine.asked.get(kind, operation.id)) != operation.id:
                engine.operations.pop(before, None)
            engine.asked[kind] = operation.id
        for operation in desired.operations:
            if operation.id in engine.operations or engine.released or engine.void:
                continue
            if operation.start_id not in ("", engine.start_id):
                continue
            if operation.kind is OperationKind.RESET:
                assert not self._is_reachable(pod, engine), "weights are overwritten only when no router has the engine"
                engine.void = f"reset:{operation.id}"
            assert (engine.start_id, operation.id) not in self.done_operations, "an operation is done once"
            self.done_operations.append((engine.start_id, operation.id))
            engine.operations[operation.id] = OperationReport(
                operation.id, OperationResult.PASSED, checksum=f"sum-{engine.bytes_version}", sharding="tp1"
            )

    def _is_reachable(self, pod: SimPod, engine: SimEngine) -> bool:
        """Through a router that is waited for: of one that should end and is not heard the node is lost."""
        url = f"http://{pod.ip}:30000"
        return any(
            router.router_workers[url].api_key == engine.key
            for router in self.pods.values()
            if url in router.router_workers and not (router.terminating and not router.takes_orders)
        )

    def _rank0_confirms(self, pod: SimPod) -> bool:
        group = pod.desired.group if pod.desired else None
        rank0 = self.pods.get(group.rank0_pod_uid) if group else None
        return rank0 is not None and not rank0.terminating

    def _held(self, pod: SimPod) -> bool:
        """A move decides whether the engine is paused."""
        order, engine = pod.desired.move if pod.desired else None, pod.engine
        if engine is None or engine.mixed:
            return True
        if order is None or order.until < Step.PAUSE:
            return False
        if pod.move is not None and pod.move.id == order.id and (pod.move.error or pod.move.aborted):
            return False
        return order.until < Step.CONTINUE if self._at_target(engine, order) else True

    @staticmethod
    def _at_target(engine: SimEngine, order: WeightMove) -> bool:
        """By the label, and by what it was applied from where both sides know that."""
        same = not engine.applied_root or not order.source.root or engine.applied_root == order.source.root
        return engine.bytes_version == order.weights.version and same and not engine.void and not engine.mixed

    def _run_move(self, pod: SimPod) -> None:
        engine = pod.engine
        order = pod.desired.move if pod.desired else None
        if engine is None or engine.state is not EngineState.SERVING:
            return
        if engine.mixed:
            self._repair(pod, engine, order)
            return
        if order is None:
            pod.move = None
            return
        if pod.move is None or pod.move.id != order.id:
            pod.move = MoveReport(order.id)
            if self._at_target(engine, order) and order.until >= Step.PAUSE and pod.rank == 0:
                # The agent reads it back from the engine: an agent that has started again comes to this, too.
                pod.move = MoveReport(order.id, reached=Step.APPLY)
                engine.paused = engine.paused or order.until < Step.CONTINUE
        given_up = pod.move.error and not pod.move.refused
        if given_up and order.source.peers and pod.move.reached < Step.PREPARE:
            pod.move = MoveReport(order.id)
        if order.abort:
            if pod.move.reached <= Step.PAUSE:
                pod.move = replace(pod.move, aborted=True)
                engine.paused = self._asked_to_pause(pod) or engine.unfit
            return
        if pod.move.error or pod.move.aborted or pod.move.reached >= order.until:
            return
        step = Step(pod.move.reached + 1)
        if step is Step.PREPARE:
            pod.move = self._stage(pod, order)
            return
        if step > Step.PREPARE and MemoryTag.WEIGHTS in engine.released:
            return  # an order that was made before the release: the agent refuses what would kill its engine
        if pod.rank == 0 and not self._do(step, pod, engine, order):
            return
        pod.move = replace(pod.move, reached=step)

    @staticmethod
    def _repair(pod: SimPod, engine: SimEngine, order: WeightMove | None) -> None:
        """Another move brings whole weights; the one that has failed does not go on."""
        failed = pod.move.id if pod.move else ""
        if order is not None and order.id != failed and order.until >= Step.APPLY and not order.abort:
            engine.bytes_version, engine.mixed, engine.void = order.weights.version, False, ""
            engine.applied_root = order.source.root
            pod.move = MoveReport(order.id, reached=Step.APPLY)

    def _run_ahead(self, pod: SimPod) -> None:
        order = pod.desired.prepare if pod.desired else None
        if order is None or pod.engine is None or pod.engine.state is not EngineState.SERVING:
            pod.ahead = None if order is None else pod.ahead
            return
        known = pod.ahead if pod.ahead is not None and pod.ahead.id == order.id else MoveReport(order.id)
        again = known.error and not known.refused and order.source.peers
        if known.reached < Step.PREPARE and (not known.error or again):
            known = self._stage(pod, order)
        pod.ahead = known

    def _stage(self, pod: SimPod, order: WeightMove) -> MoveReport:
        """What staging comes to."""
        version, source = order.weights.version, order.source
        if pod.name in self.broken_stages and not order.weights.path:
            return MoveReport(order.id, error="nothing can be staged here", refused=True)
        if source.kind in (SourceKind.DIRECT, SourceKind.COLOCATED):
            if version not in self.trainers and pod.rank == 0:
                return MoveReport(order.id, error="the trainer does not answer")
            root = root_of(version, self.takes.get(version, 0)) if pod.rank == 0 else ""
            return MoveReport(order.id, reached=Step.PREPARE, root=root)
        if source.root in pod.stage:
            return MoveReport(order.id, reached=Step.PREPARE, root=source.root)
        holding = [other for other in self.pods.values() if source.root in other.stage and not other.unreachable]
        from_peer = bool({f"{other.ip}:30001" for other in holding} & set(source.peers))
        from_trainer = source.kind is SourceKind.STAGED and version in self.trainers
        if order.weights.path in self.bad_paths:
            return MoveReport(order.id, error="tensor x has another shape", refused=True)
        if not (from_peer or from_trainer or order.weights.path):
            return MoveReport(order.id, error="nobody sends it")
        root = root_of(version, self.takes.get(version, 0) if from_trainer else 0)
        root = source.root if from_peer else f"{root}/odd" if pod.name in self.odd_pods else root
        if not self.stage_slots:
            return MoveReport(order.id, reached=Step.PREPARE)
        pod.stage = [*(held for held in pod.stage if held != root), root][-self.stage_slots :]
        return MoveReport(order.id, reached=Step.PREPARE, root=root)

    def _gives_up_apply(self, pod: SimPod, engine: SimEngine, order: WeightMove) -> bool:
        """Nothing is put in, or what is in cannot be known: what was prepared has gone since."""
        assert pod.move is not None
        if order.source.kind in (SourceKind.DIRECT, SourceKind.COLOCATED):
            there = order.weights.version in self.trainers
            same = pod.move.root == root_of(order.weights.version, self.takes.get(order.weights.version, 0))
            self.break_next_apply = self.break_next_apply or not (there and same)
            return False
        if not pod.move.root:
            assert order.weights.path, "what is applied is in the stage"
            return False
        if pod.move.root not in pod.stage:
            pod.move = MoveReport(order.id)  # prepared again, while it stays paused
            return True
        fellows = [other for other in self.pods.values() if other.engine_index == pod.engine_index and other is not pod]
        self.break_next_apply = self.break_next_apply or any(pod.move.root not in other.stage for other in fellows)
        return False

    def _do(self, step: Step, pod: SimPod, engine: SimEngine, order: WeightMove) -> bool:
        """One step on the engine; False: not done."""
        assert pod.move is not None
        if step is Step.PAUSE:
            assert self.rollout.spec.engine.pipeline_parallel_size == 1, "a pipeline does not pause"
            engine.paused = True
            if order.until is not Step.APPLY and self.cache_is_busy():
                # The old weights serve on to free the cache; past the fleet's barrier they must not.
                engine.paused = self._asked_to_pause(pod) or engine.unfit
                return False
        if step is Step.APPLY:
            assert engine.paused, "weights are applied on paused engines only"
            if self._gives_up_apply(pod, engine, order):
                return False
            if self.break_next_apply:
                self.break_next_apply = False
                engine.mixed = True
                pod.move = replace(pod.move, error="apply failed", dirty=True)
                return False
            engine.bytes_version = order.weights.version
            engine.applied_root = pod.move.root
            engine.void = ""
            if order.verify is Verify.CHECKSUM:
                engine.checksum = f"sum-{engine.root}" + ("/odd" if pod.name in self.odd_sums else "")
                engine.wrong = pod.name in self.odd_sums
                self.odd_sums.discard(pod.name)
        if step is Step.CONTINUE:
            engine.paused = self._asked_to_pause(pod) or engine.unfit
        return True

    def _asked_to_pause(self, pod: SimPod) -> bool:
        return bool(pod.desired and pod.desired.execution.state is ExecutionState.PAUSED)

    # --- reports ---

    def deliver(self, uid: str) -> None:
        """The operator hears of this pod; until the next delivery it knows no better."""
        pod = self.pods.get(uid)
        if pod is None:
            return
        if not pod.takes_orders:
            self.silent[uid] = "does not answer"
            self.delivered_agents.pop(uid, None)
            self.delivered_routers.pop(uid, None)
        elif pod.engine_index is None:
            self.delivered_routers[uid] = self._router_report(pod)
            pod.answered_order = pod.heard_order
        else:
            self.delivered_agents[uid] = self._agent_report(pod)

    def _router_report(self, pod: SimPod) -> RouterReport:
        desired = pod.router_desired
        wanted = {worker.url: worker for worker in desired.workers} if desired else None
        same = wanted is not None and {(u, w.api_key) for u, w in wanted.items()} == {
            (u, w.api_key) for u, w in pod.router_workers.items()
        }
        return RouterReport(
            revision=next(self.numbers),
            sidecar_start="x",
            pod_uid=pod.uid,
            desired_id=desired.id if desired else "",
            in_step=same and not (pod.router_pending.keys() - (wanted or {}).keys()),
            router_up=not pod.router_down,
            registered=[RegisteredWorker(w.url, w.engine, w.incarnation, True) for w in pod.router_workers.values()],
        )

    def _agent_report(self, pod: SimPod) -> AgentReport:
        engine = pod.engine
        report = EngineReport()
        if engine is not None:
            up = engine.state is EngineState.SERVING and pod.rank == 0
            draining = pod.desired is not None and pod.desired.drain
            report = EngineReport(
                state=EngineState.STOPPING if draining else engine.state,
                start_id=engine.start_id,
                data_key=engine.key,
                weight_version=engine.bytes_version if up and not engine.void else "",
                paused=engine.paused,
                launch=engine.launch,
                released=list(engine.released),
                weights_void=engine.void,
                weights_root=engine.applied_root if up and not engine.void and engine.bytes_version else "",
                weights_checksum=engine.checksum if up and not engine.void else "",
                weights_sharding="tp1",
            )
        return AgentReport(
            revision=next(self.numbers),
            agent_start=f"a{pod.agent_start}",
            pod_uid=pod.uid,
            rank=pod.rank,
            generation=pod.desired.generation if pod.desired else 0,
            incarnation=pod.desired.group.incarnation if pod.desired and pod.desired.group else 0,
            engine=report,
            move=pod.move,
            prepare=pod.ahead,
            stage=StageReport(
                [StagedWeights(label_of(root), root) for root in pod.stage],
                "there is no room" if pod.name in self.broken_stages else "",
            ),
            operations=list(engine.operations.values()) if engine else [],
        )

    def _pod_view(self, pod: SimPod) -> PodView:
        up = pod.engine is not None and pod.engine.state is EngineState.SERVING
        return PodView(
            name=pod.name,
            uid=pod.uid,
            engine=pod.engine_index,
            rank=pod.rank,
            ip=pod.ip,
            phase="Running",
            ready=pod.engine_index is None or bool(up and pod.engine and not pod.engine.unfit),
            terminating=pod.terminating,
            gone_by=pod.gone_by,
            spec_hash=pod.spec_hash,
        )

    # --- faults ---

    def kill_engine(self, uid: str) -> None:
        """The engine process dies; its agent forgets the move with it."""
        if uid in self.pods:
            self.pods[uid].engine = None
            self.pods[uid].move = None

    def delete_pod(self, uid: str) -> None:
        if uid in self.pods:
            self._terminate(self.pods[uid])

    def lose_node_of(self, uid: str) -> None:
        """The node of an engine's pod is cut off: nobody hears it or can end it; routers may still reach it."""
        if uid in self.pods and self.pods[uid].engine_index is not None:
            self.pods[uid].unreachable = True
            self._terminate(self.pods[uid])

    def return_nodes(self) -> None:
        for pod in self.pods.values():
            pod.unreachable = False
            self.silent.pop(pod.uid, None)

    def restart_router(self, uid: str) -> None:
        if uid in self.pods:
            self.pods[uid].router_workers = {}
            self.pods[uid].router_pending = {}
            self.pods[uid].router_down = True

    def restart_agent(self, uid: str) -> None:
        """It knows what it was told last and what it had begun to apply, and nothing else of how far it had come."""
        pod = self.pods.get(uid)
        if pod is not None:
            pod.agent_start += 1
            pod.move = pod.move if pod.engine is not None and pod.engine.mixed else None

    def lose_stage(self, uid: str) -> None:
        """Its memory is gone; whoever reported that it was there has not noticed."""
        if uid in self.pods:
            self.pods[uid].stage = []

    def replace_trainer(self) -> None:
        """Others are there in place of those that were: they send other bytes by the same labels."""
        for version in self.trainers:
            self.takes[version] = self.takes.get(version, 0) + 1

    def cut_off(self, uid: str) -> None:
        """The operator and this pod no longer hear each other."""
        if uid in self.pods:
            self.pods[uid].cut = True

    def reconnect(self) -> None:
        for pod in self.pods.values():
            pod.cut = False
            if not pod.unreachable:
                self.silent.pop(pod.uid, None)

    # --- truth ---

    def serving(self) -> dict[str, str]:
        """Engine name -> version of the bytes that a request gets now through some router."""
        return {
            name: "mixed" if engine.mixed or engine.void or engine.wrong else engine.bytes_version
            for name, engine in self._reached().items()
        }

    def serving_roots(self) -> set[tuple[str, str]]:
        """Labels that requests see now, each with what the bytes are."""
        return {(engine.bytes_version, engine.root) for engine in self._reached().values()}

    def _reached(self) -> dict[str, SimEngine]:
        """By pod: engines that a request gets to now through some router."""
        result = {}
        processes = {f"http://{pod.ip}:30000": pod for pod in self.pods.values() if pod.rank == 0}
        for router in self.pods.values():
            for url, worker in router.router_workers.items():
                pod = processes.get(url)
                engine = pod.engine if pod else None
                if pod is None or engine is None or engine.state is not EngineState.SERVING or engine.paused:
                    continue
                if engine.key == worker.api_key:
                    result[pod.name] = engine
        return result

    # --- running ---

    def settle(self, rounds: int = 60, seconds: float = 1.0) -> None:
        """Everything moves fairly, without faults."""
        for _ in range(rounds):
            self.reconcile()
            self.run_kubernetes()
            for uid in list(self.pods):
                self.hear(uid)
                self.run_pod(uid)
                self.deliver(uid)
            self.now += timedelta(seconds=seconds)

    def scramble(self, seed: int, after_each: Callable[[], None]) -> None:
        """A few dozen small steps in an order and at speeds that `seed` decides: some pods run ahead, others are
        heard late. `after_each` looks at the truth between any two steps."""
        chance = random.Random(seed)
        speed = {uid: chance.choice((0.1, 0.5, 1.0)) for uid in sorted(self.pods)}
        heard = {uid: chance.choice((0.2, 1.0)) for uid in sorted(self.pods)}
        told = {uid: chance.choice((0.2, 0.7, 1.0)) for uid in sorted(self.pods)}
        busy = chance.choice((0.0, 0.0, 0.4))
        self.cache_is_busy = lambda: chance.random() < busy
        for _ in range(chance.randint(2, 12)):
            for uid in chance.sample(sorted(self.pods), len(self.pods)):
                if chance.random() < told.get(uid, 1.0):
                    self.hear(uid)
                if chance.random() < speed.get(uid, 1.0):
                    self.run_pod(uid)
                    after_each()
                if chance.random() < heard.get(uid, 1.0):
                    self.deliver(uid)
            if chance.random() < 0.8:
                self.reconcile(status_write_fails=chance.random() < 0.15, late=chance.random() < 0.2)
            if chance.random() < 0.5:
                self.run_kubernetes(lambda: chance.random() < 0.5)
            after_each()
            self.now += timedelta(seconds=chance.choice((0, 0.1, 0.1, 1, 1, 20)))
        self.cache_is_busy = lambda: False

    @property
    def weights(self) -> WeightsStatus:
        """status.weights, which the first reconcile writes."""
        weights = self.rollout.status.weights
        assert weights is not None
        return weights

    def condition(self, kind: str) -> Any:
        return next(c for c in self.rollout.status.conditions if c.type == kind)


def root_of(version: str, take: int = 0) -> str:
    """Digest of what is called `version`; of another trainer's by the same label, with its number."""
    return f"root-{version}" + (f"/{take}" if take else "")


def label_of(root: str) -> str:
    return root.removeprefix("root-").partition("/")[0]


def step_boot(manifest: Any) -> WeightVersion:
    """What the fleet's ConfigMap tells an engine to boot."""

    config = json.loads(manifest["data"]["fleet.json"])
    return WeightVersion(config["boot"]["version"], config["boot"]["path"])
