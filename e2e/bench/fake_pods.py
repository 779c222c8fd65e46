"""Agents and router sidecars that hold what real ones hold, beside engines and routers that obey at once: what is
measured with them is the operator's own time. All of them live in one process, each at an address of its own."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from sglang_rollout.protocol import pod
from sglang_rollout.protocol.desired import AgentDesired, ExecutionState
from sglang_rollout.protocol.memory import LaunchOptions
from sglang_rollout.protocol.report import AgentReport, EngineReport, EngineState, MoveReport
from sglang_rollout.protocol.routing import RegisteredWorker, RouterDesired, RouterReport
from sglang_rollout.protocol.weights import Step, WeightMove, WeightVersion
from sglang_rollout.serving.errors import Superseded
from sglang_rollout.serving.longpoll import ReportBoard

D = TypeVar("D", AgentDesired, RouterDesired)
R = TypeVar("R", AgentReport, RouterReport)
Changed = Callable[[], None]


@dataclass
class FakePod(Generic[D, R]):
    """A program that holds a desired state and a report. on_change: called after the engine or router has obeyed.
    waiting: called once the report has changed."""

    uid: str
    address: str
    port: int
    board: ReportBoard[R]
    desired_type: type[D]
    on_change: Changed = lambda: None
    term: int = 0
    waiting: set[Changed] = field(default_factory=set)

    @property
    def report(self) -> R:
        return self.board.report

    def accept(self, desired: D) -> R:
        """Answers with the report as it is; what is ordered happens right after, as in a real pod."""
        if desired.lease_term < self.term:
            raise Superseded(f"lease term {desired.lease_term} is over: this pod has obeyed term {self.term}")
        self.term = desired.lease_term
        self._publish(self.noted(desired))
        asyncio.get_running_loop().call_soon(self._obey, desired)
        return self.board.report

    def noted(self, desired: D) -> R:
        """The report once `desired` was accepted."""
        raise NotImplementedError

    def obeyed(self, desired: D) -> R:
        """The report once `desired` was carried out."""
        raise NotImplementedError

    def _obey(self, desired: D) -> None:
        self._publish(self.obeyed(desired))
        self.on_change()

    def _publish(self, report: R) -> None:
        revision = self.report.revision
        if self.board.publish(report).revision != revision:
            for waiting in tuple(self.waiting):
                waiting()


@dataclass
class FakeAgent(FakePod[AgentDesired, AgentReport]):
    """An agent and its engine. stalls: seconds from pause to continue of each move. ordered_at, reached_at: when each
    step of the last move was first asked for, and when it was reached, in monotonic seconds."""

    stalls: list[float] = field(default_factory=list)
    ordered_at: dict[Step, float] = field(default_factory=dict)
    reached_at: dict[Step, float] = field(default_factory=dict)
    _move_id: str = ""

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
            launch=LaunchOptions(memory_saver=True, weights_backup=True),
        )
        report = AgentReport(0, secrets.token_hex(8), uid, 0, engine=engine)
        return cls(uid, address, pod.AGENT_PORT, ReportBoard(report), AgentDesired)

    def noted(self, desired: AgentDesired) -> AgentReport:
        if desired.move is not None:
            if desired.move.id != self._move_id:
                self._move_id, self.ordered_at, self.reached_at = desired.move.id, {}, {}
            self.ordered_at.setdefault(desired.move.until, time.monotonic())
        incarnation = desired.group.incarnation if desired.group else 0
        return replace(
            self.report, lease_term=desired.lease_term, generation=desired.generation, incarnation=incarnation
        )

    def obeyed(self, desired: AgentDesired) -> AgentReport:
        report = self.report if desired.move is None else self._moved(desired.move)
        move = report.move
        between = move is not None and not move.aborted and Step.PREPARE < move.reached < Step.CONTINUE
        released = report.engine.released if desired.memory is None else list(desired.memory.released)
        paused = between or bool(released) or desired.execution.state is ExecutionState.PAUSED
        return replace(report, engine=replace(report.engine, paused=paused, released=released))

    def _moved(self, order: WeightMove) -> AgentReport:
        """As far as the move may go."""
        report = self.report
        move = report.move
        if move is None or move.id != order.id:
            move = MoveReport(order.id)
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
