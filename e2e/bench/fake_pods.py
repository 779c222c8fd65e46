"""Agents and router sidecars that speak the protocol of real ones over HTTP, beside engines and routers that obey at
once: what is measured with them is the operator's own time. All of them live in one process, each at an address of
its own."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from aiohttp import web

from sglang_rollout.protocol import pod
from sglang_rollout.protocol.desired import AgentDesired, ExecutionState
from sglang_rollout.protocol.fleet import Trust
from sglang_rollout.protocol.report import AgentReport, EngineReport, EngineState, MoveReport
from sglang_rollout.protocol.routing import RegisteredWorker, RouterDesired, RouterReport
from sglang_rollout.protocol.weights import Step, WeightMove, WeightVersion
from sglang_rollout.protocol.wire import loads
from sglang_rollout.serving.addressed import OtherPod
from sglang_rollout.serving.errors import Superseded, json_errors
from sglang_rollout.serving.longpoll import ReportBoard, report_handler, report_response
from sglang_rollout.serving.trust import bearer_token, verify

D = TypeVar("D", AgentDesired, RouterDesired)
R = TypeVar("R", AgentReport, RouterReport)
Changed = Callable[[], None]


@dataclass
class FakePod(Generic[D, R]):
    """A program that holds a desired state and a report. on_change: called after the engine or router has obeyed."""

    uid: str
    address: str
    port: int
    board: ReportBoard[R]
    desired_type: type[D]
    on_change: Changed = lambda: None
    term: int = 0

    def accept(self, desired: D) -> R:
        """Answers with the report as it is; what is ordered happens right after, as in a real pod."""
        if desired.lease_term < self.term:
            raise Superseded(f"lease term {desired.lease_term} is over: this pod has obeyed term {self.term}")
        self.term = desired.lease_term
        self.board.publish(self.noted(desired))
        asyncio.get_running_loop().call_soon(self._obey, desired)
        return self.board.report

    def noted(self, desired: D) -> R:
        """The report once `desired` was accepted."""
        raise NotImplementedError

    def obeyed(self, desired: D) -> R:
        """The report once `desired` was carried out."""
        raise NotImplementedError

    def _obey(self, desired: D) -> None:
        self.board.publish(self.obeyed(desired))
        self.on_change()


@dataclass
class FakeAgent(FakePod[AgentDesired, AgentReport]):
    """An agent and its engine. stalls: seconds from pause to continue of each move. reached_at: when the last move
    reached each step, in monotonic seconds."""

    stalls: list[float] = field(default_factory=list)
    reached_at: dict[Step, float] = field(default_factory=dict)

    @classmethod
    def serving(cls, uid: str, address: str, boot: WeightVersion) -> FakeAgent:
        """With an engine that serves `boot`."""
        engine = EngineReport(
            state=EngineState.SERVING,
            start_id=secrets.token_hex(8),
            weight_version=boot.version,
            model_path=boot.path,
            data_key=secrets.token_hex(16),
            sglang_version="0.5.23",
        )
        report = AgentReport(0, secrets.token_hex(8), uid, 0, engine=engine)
        return cls(uid, address, pod.AGENT_PORT, ReportBoard(report), AgentDesired)

    @property
    def report(self) -> AgentReport:
        return self.board.report

    def noted(self, desired: AgentDesired) -> AgentReport:
        incarnation = desired.group.incarnation if desired.group else 0
        return replace(
            self.report, lease_term=desired.lease_term, generation=desired.generation, incarnation=incarnation
        )

    def obeyed(self, desired: AgentDesired) -> AgentReport:
        report = self.report if desired.move is None else self._moved(desired.move)
        move = report.move
        between = move is not None and not move.aborted and Step.PREPARE < move.reached < Step.CONTINUE
        paused = between or desired.execution.state is ExecutionState.PAUSED
        return replace(report, engine=replace(report.engine, paused=paused))

    def _moved(self, order: WeightMove) -> AgentReport:
        """As far as the move may go."""
        report = self.report
        move = report.move
        if move is None or move.id != order.id:
            move = MoveReport(order.id)
            self.reached_at = {}
        if order.abort:
            done = move.reached >= Step.APPLY
            return report if done else replace(report, move=replace(move, aborted=True))
        engine = report.engine
        for step in Step:
            if not move.reached < step <= order.until:
                continue
            self.reached_at[step] = time.monotonic()
            if step is Step.APPLY:
                engine = replace(engine, weight_version=order.weights.version, model_path=order.weights.path)
            if step is Step.CONTINUE:
                stall = self.reached_at[step] - self.reached_at[Step.PAUSE]
                self.stalls.append(stall)
                move = replace(move, stall_seconds=stall)
            move = replace(move, reached=step)
        return replace(report, engine=engine, move=move)


@dataclass
class FakeSidecar(FakePod[RouterDesired, RouterReport]):
    """A router's sidecar, and a router that has every worker as soon as it is told."""

    @classmethod
    def idle(cls, uid: str, address: str) -> FakeSidecar:
        report = RouterReport(0, secrets.token_hex(8), uid, router_up=True)
        return cls(uid, address, pod.ROUTER_SIDECAR_PORT, ReportBoard(report), RouterDesired)

    def noted(self, desired: RouterDesired) -> RouterReport:
        known = self.board.report
        same = known.in_step and known.desired_id == desired.id
        return replace(known, lease_term=desired.lease_term, desired_id=desired.id, in_step=same)

    def obeyed(self, desired: RouterDesired) -> RouterReport:
        workers = [RegisteredWorker(one.url, one.engine, one.incarnation, True) for one in desired.workers]
        return replace(self.board.report, in_step=True, registered=workers)


class PodServer:
    """Serves fake pods. One HTTP server answers at all their addresses; a call is for the pod that it names."""

    def __init__(self, trust: Trust) -> None:
        self._trust = trust
        self._verified: set[str] = set()
        self._pods: dict[str, FakePod[Any, Any]] = {}
        app = web.Application(middlewares=[json_errors], client_max_size=32 << 20)
        app.router.add_get(pod.PATH_REPORT, self._report)
        app.router.add_put(pod.PATH_DESIRED, self._desired)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)

    async def start(self, pods: Iterable[FakePod[Any, Any]]) -> None:
        await self._runner.setup()
        for one in pods:
            self._pods[one.uid] = one
            await web.TCPSite(self._runner, one.address, one.port).start()

    async def stop(self) -> None:
        for one in self._pods.values():
            one.board.close()
        await self._runner.cleanup()

    def _meant(self, request: web.Request) -> FakePod[Any, Any]:
        """The pod of a call by a caller that it trusts. A token is verified once: in a cluster each pod does that
        for itself, and here one process would do it for all of them."""
        token = bearer_token(request)
        if token not in self._verified:
            verify(token, self._trust)
            self._verified.add(token)
        uid = request.query.get(pod.QUERY_POD, "")
        if uid not in self._pods:
            raise OtherPod(f"no pod {uid} is here")
        return self._pods[uid]

    async def _report(self, request: web.Request) -> web.StreamResponse:
        response: web.StreamResponse = await report_handler(self._meant(request).board)(request)
        return response

    async def _desired(self, request: web.Request) -> web.Response:
        meant = self._meant(request)
        return report_response(meant.accept(loads(meant.desired_type, await request.read())))
