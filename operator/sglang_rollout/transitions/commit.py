"""A move of the fleet after its decision: the barriers of AllAtOnce and the waves of Rolling. It only goes forward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from ..api import Spec, WeightsStatus
from ..api.conditions import seconds_left, timestamp
from ..api.status import WeightTransaction
from ..protocol.weights import Step, WeightMove, WeightVersion
from .engines import EngineView
from .once import once
from .planned import EventNote
from .sources import Keepers
from .versions import bootable_version, committed_version
from .weight_steps import MoveOrders, WeightsPlan, catch_up, stuck_engines


@dataclass(frozen=True)
class Commit:
    """A decided transaction, from the reports alone: whoever leads next comes to the same steps."""

    members: list[EngineView]
    engines: tuple[EngineView, ...]
    keepers: Keepers
    spec: Spec
    weights: WeightsStatus
    transaction: WeightTransaction
    now: datetime
    routers_in_step: bool

    def plan(self) -> WeightsPlan:
        if self.spec.engine.pipeline_parallel_size > 1:
            return self._by_restart()
        return self._waves() if self._is_committed() else self._barriers()

    @property
    def target(self) -> WeightVersion:
        return WeightVersion(self.transaction.version, self.transaction.path)

    def _is_committed(self) -> bool:
        """Whether the history has the version already: then engines that are behind only follow."""
        return committed_version(self.weights).version == self.transaction.version

    def _committed(self) -> Commit:
        """The same transaction once its version is in the history."""
        status = self.weights.with_committed(self.target.version, self.target.path, self.now, self.transaction.root)
        return replace(self, weights=status.model_copy(update={"version": self.target.version}))

    def _takes_part(self, engine: EngineView) -> bool:
        return engine.index in self._taking_part

    @once
    def _taking_part(self) -> frozenset[int]:
        """By index. What is asked of every engine more than once is worked out once for all."""
        transaction, roots = self.transaction, {self.transaction.root}
        return frozenset(
            engine.index
            for engine in self.members
            if engine.movable
            and not engine.void
            and engine.progress(transaction.id) >= Step.PREPARE
            and not engine.move_error(transaction.id)
            and engine.roots(transaction.id) <= roots
        )

    def _step(self, engine: EngineView) -> Step:
        return self._steps[engine.index]

    @once
    def _steps(self) -> dict[int, Step]:
        """How far each has come. One that holds the version and goes on is through, whatever it says of the move: its
        order is dropped then, and the status that knows it may not be written yet."""
        transaction = self.transaction

        def step(engine: EngineView) -> Step:
            if self._has_moved(engine) and not engine.void and engine.root in ("", transaction.root):
                return Step.CONTINUE
            return engine.progress(transaction.id) if self._takes_part(engine) else Step.NONE

        return {engine.index: step(engine) for engine in self.members}

    @property
    def _boot(self) -> WeightVersion:
        return self.target if self.target.path else bootable_version(self.weights)

    @once
    def _orders(self) -> MoveOrders:
        return MoveOrders(self.spec, self.transaction, self.keepers)

    def _order(self, engine: EngineView, until: Step) -> WeightMove:
        return self._orders.order(engine, until)

    def _stuck(self) -> dict[int, str]:
        return stuck_engines(self.members, self.spec, bootable=bool(self.target.path))

    def _is_lost(self) -> bool:
        """No engine has the weights and none can get them: those who had staged them have gone."""
        root = self.transaction.root
        staged = root and any(root in engine.staged for engine in self.engines)
        return not (self.target.path or staged or any(engine.version == self.target.version for engine in self.engines))

    def _barriers(self) -> WeightsPlan:
        """AllAtOnce, before the version is committed: all pause, then all apply. Who has not paused when the time for
        it is over misses the barrier and is not registered any more, and so does who has not applied after as long
        again."""
        timeout = self.spec.weights.timeout_seconds
        left = seconds_left(self.transaction.decided_at, timeout, self.now)
        needed = Step.PREPARE if left > 0 else Step.PAUSE if left > -timeout else Step.APPLY
        part = [engine for engine in self.members if self._step(engine) >= needed]
        if not part and self._is_lost():
            heard = not any(engine.silent or engine.unheard for engine in self.engines)
            if heard or left <= 0:
                return self._give_up()
        paused = [engine for engine in part if self._step(engine) >= Step.PAUSE]
        inside = frozenset(engine.index for engine in part)
        outside = [engine for engine in self.engines if engine.index not in inside]
        everyone_paused = len(paused) == len(part)
        # An engine outside may still serve the old version: it must be out of every router before the new one serves,
        # and its moving ahead of the others would put two versions side by side.
        alone = everyone_paused and (self.routers_in_step or not outside) and (part or not self._is_lost())
        until = Step.APPLY if alone else Step.PAUSE
        applied = [engine for engine in part if self._step(engine) >= Step.APPLY]
        if alone and len(applied) == len(part):
            # What follows needs routers that have other engines than now: it must be known to be over by then.
            return replace(self._committed()._waves(), decision=bool(outside))
        moves = {engine.index: self._order(engine, until) for engine in part if self._takes_part(engine)}
        missing = ", ".join(engine.name for engine in outside)
        waits = f"waiting until no router has {missing}" if everyone_paused and not alone else ""
        return WeightsPlan(
            status=self._status("Committing", prepared=len(part), committed=len(applied), message=waits[:2000]),
            boot=self._boot,
            moves=moves,
            holds=inside,
            closed=True,
            engaged=inside,
            restarts=self._stuck(),
            wake=left if left > 0 else max(left + timeout, 0.0) or None,
        )

    def _waves(self) -> WeightsPlan:
        """The version is committed. AllAtOnce: all continue. Rolling: as many at once as may be away."""
        rolling = self.spec.weights.update_strategy.type == "Rolling"
        unmoved = [engine for engine in self.members if engine.movable and not self._has_moved(engine)]
        onward = {engine.index: self._onward(engine) for engine in unmoved}
        behind = [engine for engine in unmoved if onward[engine.index] is not None]
        away = sum(1 for engine in self.members if not engine.healthy)
        begun = [engine for engine in behind if engine.progress(self.transaction.id) >= Step.PAUSE]
        engaged = frozenset(engine.index for engine in begun)
        waiting = [engine for engine in behind if engine.index not in engaged]
        slots = self.spec.weights.update_strategy.max_unavailable - away - len(begun)
        chosen = [*begun, *waiting[: max(slots, 0)]] if rolling else behind
        moves = {engine.index: order for engine in chosen if (order := onward[engine.index]) is not None}
        moves |= {
            engine.index: self._order(engine, Step.PREPARE)
            for engine in waiting
            if engine.index not in moves and engine.progress(self.transaction.id) >= Step.PREPARE
        }
        moved = [engine for engine in self.members if self._has_moved(engine)]
        stranded = frozenset(engine.index for engine in unmoved if onward[engine.index] is None)
        if all(_refuses(engine) for engine in behind):
            # What it is asked to take cannot help it: later versions must not wait for it.
            return replace(self._done(len(moved)), stranded=stranded)
        return WeightsPlan(
            status=self._status("Verifying" if not rolling else "Committing", committed=len(moved), message=""),
            boot=self._boot,
            moves=moves,
            # AllAtOnce: others serve the new version by now, so nobody is held who may still have the old one.
            holds=engaged if rolling else frozenset(),
            engaged=engaged,
            restarts=self._stuck(),
            stranded=stranded,
        )

    def _onward(self, engine: EngineView) -> WeightMove | None:
        """This transaction's move to its end, or a catch-up for an engine that has not prepared it or failed it; None
        when nobody has the weights any more."""
        if self._takes_part(engine):
            return self._order(engine, Step.CONTINUE)
        return catch_up(self.spec, engine, self.keepers, self.weights, self.now)

    def _has_moved(self, engine: EngineView) -> bool:
        if engine.version != self.transaction.version or not engine.healthy:
            return False
        move = engine.leader.move if engine.leader else None
        return move is None or not (Step.PREPARE < move.reached < Step.CONTINUE)

    def _by_restart(self) -> WeightsPlan:
        """SGLang's pipeline loop ignores pause, so its weights move by new engine processes: whoever is to end leaves
        the routers first. AllAtOnce: none of the new ones is registered before all old ones have ended, or missed the
        time for it."""
        wanted = [engine for engine in self.members if engine.wanted]
        behind = [engine for engine in wanted if engine.movable and self._is_old(engine)]
        rolling = self.spec.weights.update_strategy.type == "Rolling"
        left = seconds_left(self.transaction.decided_at, self.spec.weights.timeout_seconds, self.now)
        # In step: no router has one of the old ones, nor one that is not heard or not wanted any more.
        if not behind if rolling else self.routers_in_step and (not behind or left <= 0):
            done = self._committed()._done(sum(1 for engine in wanted if not self._is_old(engine)))
            return replace(done, decision=not rolling)  # as after the barriers
        chosen = behind[: self._free_turns(wanted)] if rolling else behind
        return WeightsPlan(
            status=self._status("Committing", committed=len(wanted) - len(behind)),
            boot=self._boot,
            holds=frozenset(engine.index for engine in wanted if engine.healthy and not self._is_old(engine)),
            closed=not rolling,
            restarts={engine.index: engine.start_id for engine in chosen},
            wake=left if left > 0 else None,
        )

    def _free_turns(self, wanted: list[EngineView]) -> int:
        """How many more engines may be away. One that has started again is back when the routers were given it."""
        away = sum(1 for engine in wanted if not (engine.healthy and (self._is_old(engine) or engine.was_given)))
        return max(self.spec.weights.update_strategy.max_unavailable - away, 0)

    def _is_old(self, engine: EngineView) -> bool:
        return engine.version != self.target.version

    def _give_up(self) -> WeightsPlan:
        """The one end of a decided move that is none: all who had the weights died before any of them served."""
        text = "every engine that had staged it is gone: publish it again under another label"
        status = self._status("Failed", completed_at=timestamp(self.now), message=text)
        note = EventNote("Warning", "WeightsLost", f"version {self.target.version}: {text}")
        return WeightsPlan(status=status, boot=bootable_version(self.weights), restarts=self._stuck(), events=(note,))

    def _done(self, committed: int) -> WeightsPlan:
        stalls = [
            move.stall_seconds
            for engine in self.members
            for move in engine.moves(self.transaction.id)[:1]
            if move is not None
        ]
        status = self._status(
            "Idle",
            committed=committed,
            completed_at=timestamp(self.now),
            stall_seconds=f"{max(stalls):.3f}" if any(stalls) else None,
        )
        text = f"{committed} engines serve version {self.target.version}"
        note = EventNote("Normal", "WeightsCommitted", text)
        return WeightsPlan(status=status, boot=self._boot, restarts=self._stuck(), events=(note,))

    def _status(self, phase: str, **changes: object) -> WeightsStatus:
        transaction = self.transaction.model_copy(update=changes)
        return self.weights.model_copy(update={"phase": phase, "transaction": transaction})


def _refuses(engine: EngineView) -> bool:
    """The engine takes no weights as it is, however often it is asked."""
    return bool(engine.leader and engine.leader.move and engine.leader.move.refused)
