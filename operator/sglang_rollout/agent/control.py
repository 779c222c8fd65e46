"""The agent's one loop: read the engine, plan, act, report; woken by new orders and, every while, by itself."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from dataclasses import replace

from sglang_rollout.protocol.desired import AgentDesired, ExecutionState
from sglang_rollout.protocol.report import AgentIdentity, AgentReport, EngineState
from sglang_rollout.serving.longpoll import ReportBoard

from . import actions, plan
from .actions import REPEAT_SECONDS
from .actor import Actor
from .drain_watch import DrainWatch
from .engine_report import engine_report
from .engine_watch import EngineWatch
from .group import StartGate
from .kills import Kills
from .launch_requests import LaunchRequests
from .move_report import move_report, prepare_report
from .probe import GenerationProbe
from .rank0_watch import Rank0Watch
from .settings import AgentSettings
from .sglang import SGLang
from .situation import EngineFacts, should_run

TICK_SECONDS = 1.0
STARTING_TICK_SECONDS = 0.5
DRAIN_TICK_SECONDS = 0.25
DRAIN_MARGIN_SECONDS = 5.0  # for what was aborted to be gone
TELL_SECONDS = 0.05  # until it is told what goes on
# Steps during which no token can come, so that the probe must not wait for one.
_STOPPING = (actions.Pause, actions.Empty, actions.Operate)
SILENCE_SECONDS = 60.0  # of an engine that has served, whatever it is asked to do


class Control:
    """Brings the engine of this pod to the operator's desired state and says how far it is."""

    def __init__(
        self,
        settings: AgentSettings,
        watch: EngineWatch,
        actor: Actor,
        gate: StartGate,
        clock: Callable[[], float],
        lease_term: int = 0,
    ) -> None:
        self._settings = settings
        self._watch = watch
        self._actor = actor
        self._clock = clock
        self._lease_term = lease_term
        self._woken = asyncio.Event()
        self.launches = LaunchRequests(gate, actor, clock, self._publish, self._woken.set)
        self._failure: OSError | None = None
        self._pod_ends = False
        self._is_drained = asyncio.Event()
        self._message = ""
        self._drain = DrainWatch(watch, settings.drain_seconds, clock)
        self._kills = Kills(watch, self._on_kill, self._woken.set)
        self.board: ReportBoard[AgentReport] = ReportBoard(
            AgentReport(0, secrets.token_hex(8), settings.pod_uid, settings.rank)
        )
        self._rank0 = Rank0Watch(watch, actor, gate, self._kills)
        self._probe = GenerationProbe(self._to_probe, self._on_wedged, clock)
        actor.when_saved(self._publish)
        actor.when_prepared(self._look_at_preparations)
        self._publish()

    # --- orders ---

    @property
    def _facts(self) -> EngineFacts:
        return self._watch.facts

    @property
    def desired(self) -> AgentDesired | None:
        return self._actor.journal.desired

    def accept(self, desired: AgentDesired) -> AgentReport:
        """A desired state of a term that is obeyed: remembered before it is answered."""
        self._lease_term = desired.lease_term
        desired = _never_back(desired, self.desired)
        if desired != self.desired:
            self._actor.remember(desired=desired)
            self._actor.save()
        self._woken.set()
        self._publish()
        return self.board.report

    def give_up(self, error: OSError) -> None:
        """What must outlive this process cannot be written: an agent that obeys nobody must not seem well. The loop
        ends by it, and so does the process."""
        self._failure = error
        self._woken.set()

    async def drain(self) -> None:
        """The pod ends: returns when nothing runs any more, or when the time for it is over."""
        self._pod_ends = True
        self._drain.begin()
        self._woken.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_seconds + DRAIN_MARGIN_SECONDS):
                await self._is_drained.wait()

    def identity(self) -> AgentIdentity:
        group = self.desired.group if self.desired else None
        start = self.launches.last_start or self._facts.start_id
        return AgentIdentity(self._settings.pod_uid, self._settings.rank, group.incarnation if group else 0, start)

    @property
    def serves(self) -> bool:
        """Fit for traffic or for being its group's member; paused counts as serving, unless it holds no weights or has
        released memory."""
        open_apply = self._actor.journal.open_apply
        dirty = open_apply is not None and open_apply.start_id == self._facts.start_id
        return self._state() is EngineState.SERVING and not dirty and not self._shut()

    def _shut(self) -> bool:
        held = self._actor.journal.residency
        ours = held is not None and held.start_id == self._facts.start_id
        return ours and bool(held and (held.released or held.doing or held.void))

    # --- for a trainer that drives the engine ---

    @property
    def hands_off(self) -> bool:
        return bool(self.desired and self.desired.hands_off)

    @property
    def open_door(self) -> bool:
        return bool(self.desired and self.desired.open_door)

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    def look(self) -> None:
        """The engine may have been changed: it is read again now."""
        self._woken.set()

    def close(self) -> None:
        """Whoever waits for a report or for a start is answered now, and asks the agent that comes next."""
        self.launches.close()
        self.board.close()

    # --- the loop ---

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._loop())
            group.create_task(self._probe.run())
            if self._settings.rank > 0:
                group.create_task(self._rank0.run())

    async def _loop(self) -> None:
        while True:
            self._woken.clear()
            if self._failure is not None:
                raise self._failure
            await self._watch.observe()
            self._kills.follow()
            if self._actor.must_register(self._facts):
                await self._actor.register(self._facts)
            self._actor.warm(self._facts)
            wait = await self._advance() if self.desired else TICK_SECONDS
            if self._facts.state is EngineState.STARTING:
                wait = min(wait, STARTING_TICK_SECONDS)
            await self._look_after_engine()
            self._actor.save()
            self._publish()
            if self._draining():
                wait = min(wait, DRAIN_TICK_SECONDS)
            # Not by wait_for: before Python 3.12 it loses a cancellation that comes with the wake-up.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(wait, 0.0)):
                    await self._woken.wait()

    def _look_at_preparations(self) -> None:
        self._woken.set()
        self._publish()

    async def _advance(self) -> float:
        """Steps until there is nothing to do now. Returns the seconds until it should look again."""
        last: actions.Action | None = None
        while not self._kills.under_way and not self._actor.must_register(self._facts):
            assert self.desired is not None
            situation = self._actor.situation(self.desired, self._facts)
            action = plan.next_action(situation)
            if isinstance(action, actions.Nothing):
                self._message = action.why
                if last is not None:
                    return 0.0  # what was assumed of the engine after the steps is to be read from it
                return TICK_SECONDS if action.until is None else min(TICK_SECONDS, action.until - self._clock())
            if action == last:
                return REPEAT_SECONDS
            if isinstance(action, actions.Kill):
                self._kills.kill(action.reason, ordered=action.ordered)
                return REPEAT_SECONDS
            self._message = f"step: {type(action).__name__}"
            if isinstance(action, _STOPPING):
                self._probe.rest()
            # Most steps take milliseconds, of a pause: whoever waits for reports is only woken for what lasts.
            telling = asyncio.get_running_loop().call_later(TELL_SECONDS, self._publish)
            try:
                done = await self._actor.perform(action, situation)
            finally:
                telling.cancel()
            if not done and not isinstance(action, actions.Flush):
                return REPEAT_SECONDS
            last = action
        return TICK_SECONDS

    async def _look_after_engine(self) -> None:
        limit = max(SILENCE_SECONDS, self.desired.probe_seconds if self.desired else 0.0)
        if self._watch.silent_seconds > limit:
            self._kills.kill(f"it has not answered for {limit:g} s", probe=True)
        joined = self._actor.journal.joined
        group = self.desired.group if self.desired else None
        if joined and group and joined.start_id == self._facts.start_id and not joined.group.same_pods(group):
            self._kills.kill("its group is of other pods now", ordered=True)
        await self._look_at_drain()

    async def _look_at_drain(self) -> None:
        if self._facts.state is not EngineState.SERVING or self._settings.rank > 0:
            return
        if not self._draining():
            self._drain.forget()
            return
        held = bool(self.desired and self.desired.execution.state is ExecutionState.PAUSED)
        # Whoever drives the engine by itself decides what becomes of its requests.
        await self._drain.look(held, may_abort=not self.hands_off)

    # --- the engine's end ---

    def _to_probe(self) -> tuple[SGLang, float] | None:
        desired = self.desired
        if desired is None or desired.probe_seconds <= 0 or self._kills.under_way or self._draining():
            return None
        if not should_run(self._actor.situation(desired, self._facts)):
            return None
        return self._watch.engine, desired.probe_seconds

    def _on_wedged(self, sentence: str) -> None:
        self._kills.kill(sentence, probe=True)

    def _on_kill(self) -> None:
        self._probe.rest()
        self._publish()

    # --- the report ---

    def _draining(self) -> bool:
        return self._pod_ends or bool(self.desired and self.desired.drain)

    def _drained(self) -> bool:
        if not self._draining():
            return False
        serving = self._facts.state is EngineState.SERVING and self._settings.rank == 0
        return self._drain.done() if serving else True

    def _state(self) -> EngineState:
        if self.launches.waiting.start_id:
            return EngineState.WAITING
        if self._facts.state is EngineState.ABSENT:
            return EngineState.ABSENT
        if self._kills.under_way or self._draining():
            return EngineState.STOPPING
        if self._actor.must_register(self._facts):
            return EngineState.STARTING  # nobody may send it requests before its ranks have the stage
        return self._facts.state

    def _publish(self) -> None:
        desired = self.desired
        situation = self._actor.situation(desired, self._facts) if desired else None
        start = self._watch.record.start_id if self._watch.record else ""
        drained = self._drained()
        self.board.publish(
            replace(
                self.board.report,
                lease_term=self._lease_term,
                generation=desired.generation if desired else 0,
                incarnation=desired.group.incarnation if desired and desired.group else 0,
                engine=engine_report(self._watch, self._state(), situation, self.launches.waiting),
                move=move_report(situation) if situation else None,
                prepare=prepare_report(situation) if situation else None,
                stage=self._actor.stage_report(),
                operations=[record.report for record in situation.operations] if situation else [],
                probe_failure=self._kills.probe_failure(start),
                drained=drained,
                message=self.launches.waiting.reason or self._message,
            )
        )
        if drained:
            self._is_drained.set()
        else:
            self._is_drained.clear()


def _never_back(desired: AgentDesired, before: AgentDesired | None) -> AgentDesired:
    """`until` of one move only grows: what was ordered on late knowledge must not undo a step that was ordered."""
    if before is None or before.move is None or desired.move is None or before.move.id != desired.move.id:
        return desired
    until = max(desired.move.until, before.move.until)
    return replace(desired, move=replace(desired.move, until=until))
