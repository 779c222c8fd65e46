"""The fleet's move from one version of the weights to another, as one transaction.

  PREPARE   every engine that serves checks the checkpoint; the engines go on generating. One refusal ends the
            transaction: nothing has changed, the old version keeps serving, it is tried again later.
  DECIDE    Commit is written to status before any engine is paused. From here the transaction only goes forward.
  COMMIT    AllAtOnce: all pause | all apply | all continue, each a barrier, so two versions never serve at once.
            Rolling: the same, engine by engine, in waves of maxUnavailable.
  DONE      the version is in the history when all that take part have applied it; engines that start load it.

An engine that takes no part (it was starting, it failed, it missed the deadline) is not routable at the old version
any more and catches up alone: it starts at the committed version, or moves to it without a barrier.
An engine that takes part stays registered with the routers while it is paused: its requests wait. It is neither
drained nor removed before it has come through.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from datetime import datetime

from ..api import Spec, WeightsStatus
from ..api.conditions import seconds_left, timestamp
from ..api.status import WeightTransaction
from ..protocol.report import EngineState
from ..protocol.weights import KVCache, PauseMode, Step, WeightMove, WeightVersion
from .engines import EngineView
from .planned import EventNote
from .versions import boot_version, committed_version, target_version

# A refused checkpoint may be one that is still being written.
RETRY_SECONDS = 30.0


@dataclass(frozen=True)
class WeightsPlan:
    """moves: by engine index. holds: engines in the barrier, registered although they serve an old version (they
    are paused or will be before anything new serves). closed: no engine may be newly registered now.
    engaged: engines that must not be taken away now, since the others count on them.
    restarts: start ids of engines to be killed, by index. decision: status holds a new decision."""

    status: WeightsStatus
    boot: WeightVersion
    moves: dict[int, WeightMove] = field(default_factory=dict)
    holds: frozenset[int] = frozenset()
    closed: bool = False
    engaged: frozenset[int] = frozenset()
    restarts: dict[int, str] = field(default_factory=dict)
    decision: bool = False
    events: tuple[EventNote, ...] = ()
    wake: float | None = None


def advance(
    engines: Collection[EngineView],
    spec: Spec,
    status: WeightsStatus | None,
    generation: int,
    now: datetime,
    routers_in_step: bool,
) -> WeightsPlan:
    """The next step. routers_in_step: every router has exactly the engines that are to be registered now."""
    weights = status or WeightsStatus()
    if not weights.history:
        boot = boot_version(spec)
        weights = weights.with_committed(boot.version, boot.path, now)
    if spec.control == "External":
        return _follow(engines, weights, now)
    weights = _with_path(weights, target_version(spec))
    committed = committed_version(weights)
    target = target_version(spec) or committed
    members = [engine for engine in engines if engine.wanted]
    known = {"version": committed.version, "target_version": target.version, "served": _has_served(members, weights)}
    weights = weights.model_copy(update=known)
    transaction = weights.transaction
    is_open = transaction is not None and transaction.completed_at is None
    if transaction is not None and is_open and transaction.decision == "Commit":
        # An engine that is not wanted any more and takes part comes through first.
        parting = [e for e in engines if not e.wanted and e.progress(transaction.id) >= Step.PREPARE]
        return _Commit([*members, *parting], tuple(engines), spec, weights, transaction, now, routers_in_step).plan()
    if target.version == committed.version:
        return _settle(members, spec, weights, "Idle", now)
    if not weights.served:
        # Nothing was ever served, so there is nothing to protect: the fleet starts at the target instead.
        fresh = weights.model_copy(update={"history": (), "transaction": None, "phase": "Idle"})
        fresh = fresh.with_committed(target.version, target.path, now).model_copy(update={"version": target.version})
        return _settle(members, spec, fresh, "Idle", now)
    return _prepare(members, spec, weights, target, generation, now)


def _with_path(weights: WeightsStatus, named: WeightVersion | None) -> WeightsStatus:
    """With the folder that spec names for the newest version, where a trainer moved the fleet to it and told none."""
    newest = weights.history[-1]
    if newest.path or named is None or named.version != newest.version:
        return weights
    told = newest.model_copy(update={"path": named.path})
    return weights.model_copy(update={"history": (*weights.history[:-1], told)})


def _follow(engines: Collection[EngineView], weights: WeightsStatus, now: datetime) -> WeightsPlan:
    """Somebody else moves the weights: the newest version read back from an engine is the target. An engine that
    starts again loads the newest version whose checkpoint is known, and is not routable until it was moved on."""
    members = [engine for engine in engines if engine.wanted]
    for engine in members:
        if engine.version and weights.lag(engine.version) is None:
            weights = weights.with_committed(engine.version, "", now)
    held = {engine.version for engine in members}
    if len(held) == 1 and (back := _trained(weights, held.pop())):
        # All have it again: the trainer went back to it.
        weights = weights.with_committed(back, "", now)
    newest = weights.history[-1].version
    known = next(entry for entry in reversed(weights.history) if entry.path)
    status = weights.model_copy(update={"version": newest, "target_version": newest, "phase": "Idle"})
    return WeightsPlan(status=status, boot=WeightVersion(known.version, known.path))


def _trained(weights: WeightsStatus, version: str) -> str:
    """`version` if only the trainer can have put it there; what engines start from is no sign of a wish."""
    return next((entry.version for entry in weights.history if entry.version == version and not entry.path), "")


# --- before the decision ---------------------------------------------------------------------------------------


def _prepare(
    members: list[EngineView], spec: Spec, weights: WeightsStatus, target: WeightVersion, generation: int, now: datetime
) -> WeightsPlan:
    transaction = weights.transaction
    # A change of something else does not begin an open move anew: that would be for ever, if changes are frequent.
    same = transaction is not None and (transaction.version, transaction.path) == (target.version, target.path)
    if transaction is None or not same or (transaction.completed_at and transaction.generation != generation):
        transaction = _new_transaction(target, generation, 1, now)
        if reason := _relabelled(weights, target):
            return _fail(members, spec, weights, transaction, reason, now)
        note = EventNote("Normal", "WeightsStaging", f"preparing version {target.version} from {target.path}")
        return _preparing(members, spec, weights, transaction, "Staging", now, (note,))
    if transaction.completed_at is not None:
        wait = seconds_left(transaction.completed_at, RETRY_SECONDS, now)
        if wait > 0:
            plan = _settle(members, spec, weights, "Failed", now)
            return replace(plan, wake=wait if plan.wake is None else min(wait, plan.wake))
        again = _new_transaction(target, generation, _attempt(transaction) + 1, now)
        if _relabelled(weights, target):
            return replace(_settle(members, spec, weights, "Failed", now), wake=None)
        # The reason of the last failure stays in sight while it is tried again.
        again = again.model_copy(update={"message": transaction.message})
        return _preparing(members, spec, weights, again, "Failed", now, ())
    return _judge(members, spec, weights, transaction, now)


def _judge(
    members: list[EngineView], spec: Spec, weights: WeightsStatus, transaction: WeightTransaction, now: datetime
) -> WeightsPlan:
    """What the reports of the preparing engines add up to."""
    candidates = [engine for engine in members if engine.healthy]
    refusals = [engine.move_error(transaction.id) for engine in candidates if engine.move_refused(transaction.id)]
    if refusals:
        return _fail(members, spec, weights, transaction, refusals[0], now)
    prepared = [engine for engine in candidates if engine.progress(transaction.id) >= Step.PREPARE]
    transaction = transaction.model_copy(update={"prepared": len(prepared)})
    left = seconds_left(transaction.started_at, spec.weights.timeout_seconds, now)
    if candidates and len(prepared) == len(candidates):
        return _decide(members, spec, weights, transaction, now)
    if not candidates and not any(_is_coming(engine) for engine in members):
        return _decide(members, spec, weights, transaction, now)
    if left <= 0:
        if prepared:
            return _decide(members, spec, weights, transaction, now)
        errors = [engine.move_error(transaction.id) for engine in candidates if engine.move_error(transaction.id)]
        reason = errors[0] if errors else "no engine was ready to prepare it in time"
        return _fail(members, spec, weights, transaction, reason, now)
    phase = "Failed" if _attempt(transaction) > 1 else "Staging"
    return replace(_preparing(members, spec, weights, transaction, phase, now, ()), wake=left)


def _relabelled(weights: WeightsStatus, target: WeightVersion) -> str:
    """Why this label cannot be used for these bytes: it was used for others, and engines or a trainer's records may
    still know it as those. Empty: it can."""
    other = [e.path for e in weights.history if e.version == target.version and e.path not in ("", target.path)]
    if not other:
        return ""
    return f"version {target.version} was served from {other[0]}: give {target.path} a label of its own"


def _preparing(
    members: list[EngineView],
    spec: Spec,
    weights: WeightsStatus,
    transaction: WeightTransaction,
    phase: str,
    now: datetime,
    events: tuple[EventNote, ...],
) -> WeightsPlan:
    settled = _settle(members, spec, weights, phase, now, busy=transaction)
    moves = {
        engine.index: _move(spec, transaction, Step.PREPARE)
        for engine in members
        if engine.healthy and engine.index not in settled.moves
    }
    return replace(settled, moves={**settled.moves, **moves}, events=events)


def _decide(
    members: list[EngineView], spec: Spec, weights: WeightsStatus, transaction: WeightTransaction, now: datetime
) -> WeightsPlan:
    decided = transaction.model_copy(update={"decision": "Commit", "decided_at": timestamp(now), "message": ""})
    plan = _preparing(members, spec, weights, decided, "Committing", now, ())
    note = EventNote("Normal", "WeightsCommitting", f"{transaction.prepared} engines move to {transaction.version}")
    status = plan.status
    if spec.weights.update_strategy.type == "Rolling":
        # Both versions serve while the waves go on: the old one is behind by one from now.
        status = status.with_committed(transaction.version, transaction.path, now)
    return replace(plan, status=status, decision=True, events=(note,), wake=0.0)


def _fail(
    members: list[EngineView],
    spec: Spec,
    weights: WeightsStatus,
    transaction: WeightTransaction,
    reason: str,
    now: datetime,
) -> WeightsPlan:
    ended = transaction.model_copy(
        update={"decision": "Abort", "completed_at": timestamp(now), "message": reason[:2000]}
    )
    weights = weights.model_copy(update={"transaction": ended})
    plan = _settle(members, spec, weights, "Failed", now)
    first = _attempt(transaction) == 1
    text = f"version {transaction.version} is refused, {weights.version} keeps serving: {reason}"
    events = (EventNote("Warning", "WeightsRefused", text),) if first else ()
    return replace(plan, events=events, wake=RETRY_SECONDS)


# --- nothing to decide: engines alone --------------------------------------------------------------------------


def _settle(
    members: Collection[EngineView],
    spec: Spec,
    weights: WeightsStatus,
    phase: str,
    now: datetime,
    busy: WeightTransaction | None = None,
) -> WeightsPlan:
    """Every engine at the committed version: those that are not catch up alone. busy: the transaction that is in
    preparation; without one, moves that engines still prepare are given up."""
    committed = committed_version(weights)
    moves: dict[int, WeightMove] = {}
    for engine in members:
        move = engine.leader.move if engine.leader else None
        if engine.movable and engine.version != committed.version:
            moves[engine.index] = _catch_up(spec, engine, committed, now)
        elif move is not None and move.reached in (Step.NONE, Step.PREPARE) and busy is None and not move.aborted:
            moves[engine.index] = replace(_given_up(spec, weights, move.id), abort=True)
        elif engine.healthy and move is not None and Step.PREPARE < move.reached < Step.CONTINUE:
            # A move that was under way when its transaction ended is brought to its end.
            moves[engine.index] = _catch_up(spec, engine, committed, now)
    transaction = busy if busy is not None else weights.transaction
    if busy is None and transaction is not None and transaction.completed_at is None:
        transaction = transaction.model_copy(update={"decision": "Abort", "completed_at": timestamp(now)})
    status = weights.model_copy(update={"phase": phase, "transaction": transaction})
    refused = any(e.move_refused(moves[e.index].id) for e in members if e.index in moves)
    wake = RETRY_SECONDS if refused else None
    return WeightsPlan(status=status, boot=committed, moves=moves, restarts=_restarts(members, spec), wake=wake)


def _catch_up(spec: Spec, engine: EngineView, committed: WeightVersion, now: datetime) -> WeightMove:
    return WeightMove(
        id=_catch_up_id(engine, committed, now),
        weights=committed,
        until=Step.CONTINUE,
        pause_mode=PauseMode(spec.weights.pause_mode),
        kv_cache=KVCache(spec.weights.kv_cache),
        timeout_seconds=float(spec.weights.timeout_seconds),
    )


def _catch_up_id(engine: EngineView, committed: WeightVersion, now: datetime) -> str:
    """The same while it goes on; another one from time to time after it was refused, to try again."""
    name = f"catch-up:{engine.start_id}:{committed.version}" + (f":{engine.void}" if engine.void else "")
    move = engine.leader.move if engine.leader else None
    if move is None or move.id.split("#")[0] != name:
        return name
    return f"{name}#{int(now.timestamp() // RETRY_SECONDS)}" if move.error else move.id


def _given_up(spec: Spec, weights: WeightsStatus, move_id: str) -> WeightMove:
    return WeightMove(move_id, committed_version(weights), Step.PREPARE, PauseMode(spec.weights.pause_mode))


def _restarts(members: Collection[EngineView], spec: Spec) -> dict[int, str]:
    """Engines whose weights nobody can vouch for, and those that cannot move while they run."""
    if spec.weights.failure_policy == "KeepGated":
        return {}
    stuck = {}
    for engine in members:
        catching_up = f"catch-up:{engine.start_id}:"
        move = engine.leader.move if engine.leader else None
        failed = move is not None and move.id.startswith(catching_up) and move.error and not move.refused
        if engine.start_id and (engine.dirty or failed):
            stuck[engine.index] = engine.start_id
    return stuck


# --- after the decision ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Commit:
    """A decided transaction, from the reports alone: whoever leads next comes to the same steps."""

    members: list[EngineView]
    engines: tuple[EngineView, ...]
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

    def _committed(self) -> _Commit:
        """The same transaction once its version is in the history."""
        status = self.weights.with_committed(self.target.version, self.target.path, self.now)
        return replace(self, weights=status.model_copy(update={"version": self.target.version}))

    def _takes_part(self, engine: EngineView) -> bool:
        return (
            engine.movable
            and not engine.void
            and engine.progress(self.transaction.id) >= Step.PREPARE
            and not engine.move_error(self.transaction.id)
        )

    def _barriers(self) -> WeightsPlan:
        """AllAtOnce, before the version is committed: all pause, then all apply. Who has not paused when the time for
        it is over misses the barrier and is not registered any more, and so does who has not applied after as long
        again."""
        timeout = self.spec.weights.timeout_seconds
        left = seconds_left(self.transaction.decided_at, timeout, self.now)
        needed = Step.PREPARE if left > 0 else Step.PAUSE if left > -timeout else Step.APPLY
        part = [e for e in self.members if self._takes_part(e) and e.progress(self.transaction.id) >= needed]
        paused = [engine for engine in part if engine.progress(self.transaction.id) >= Step.PAUSE]
        outside = [engine for engine in self.engines if engine not in part]
        everyone_paused = len(paused) == len(part)
        # An engine outside may still serve the old version: it must be out of every router before the new one serves,
        # and its moving ahead of the others would put two versions side by side.
        alone = everyone_paused and (self.routers_in_step or not outside)
        until = Step.APPLY if alone else Step.PAUSE
        applied = [engine for engine in part if engine.progress(self.transaction.id) >= Step.APPLY]
        if alone and len(applied) == len(part):
            return self._committed()._waves()
        moves = {engine.index: _move(self.spec, self.transaction, until) for engine in part}
        missing = ", ".join(engine.name for engine in outside)
        waits = f"waiting until no router has {missing}" if everyone_paused and not alone else ""
        members = frozenset(engine.index for engine in part)
        return WeightsPlan(
            status=self._status("Committing", prepared=len(part), committed=len(applied), message=waits[:2000]),
            boot=self.target,
            moves=moves,
            holds=members,
            closed=True,
            engaged=members,
            restarts=_restarts(self.members, self.spec),
            wake=left if left > 0 else max(left + timeout, 0.0) or None,
        )

    def _waves(self) -> WeightsPlan:
        """The version is committed. AllAtOnce: all continue. Rolling: as many at once as may be away."""
        rolling = self.spec.weights.update_strategy.type == "Rolling"
        behind = [engine for engine in self.members if engine.movable and not self._has_moved(engine)]
        away = sum(1 for engine in self.members if not engine.healthy)
        begun = [engine for engine in behind if engine.progress(self.transaction.id) >= Step.PAUSE]
        waiting = [engine for engine in behind if engine not in begun]
        slots = self.spec.weights.update_strategy.max_unavailable - away - len(begun)
        chosen = [*begun, *waiting[: max(slots, 0)]] if rolling else behind
        moves = {engine.index: self._onward(engine) for engine in chosen}
        moves |= {
            engine.index: _move(self.spec, self.transaction, Step.PREPARE)
            for engine in waiting
            if engine.index not in moves and engine.progress(self.transaction.id) >= Step.PREPARE
        }
        moved = [engine for engine in self.members if self._has_moved(engine)]
        if not behind:
            return self._done(len(moved))
        engaged = frozenset(engine.index for engine in begun)
        return WeightsPlan(
            status=self._status("Verifying" if not rolling else "Committing", committed=len(moved), message=""),
            boot=self.target,
            moves=moves,
            # AllAtOnce: others serve the new version by now, so nobody is held who may still have the old one.
            holds=engaged if rolling else frozenset(),
            engaged=engaged,
            restarts=_restarts(self.members, self.spec),
        )

    def _onward(self, engine: EngineView) -> WeightMove:
        """This transaction's move to its end, or a catch-up for an engine that has not prepared it or failed it."""
        if self._takes_part(engine):
            return _move(self.spec, self.transaction, Step.CONTINUE)
        return _catch_up(self.spec, engine, self.target, self.now)

    def _has_moved(self, engine: EngineView) -> bool:
        if not engine.healthy or engine.version != self.target.version:
            return False
        move = engine.leader.move if engine.leader else None
        return move is None or not (Step.PREPARE < move.reached < Step.CONTINUE)

    def _by_restart(self) -> WeightsPlan:
        """SGLang's pipeline loop ignores pause, so its weights move by new engine processes."""
        moved = self._committed()
        behind = [e for e in self.members if e.movable and e.version != self.target.version]
        rolling = self.spec.weights.update_strategy.type == "Rolling"
        away = sum(1 for engine in self.members if not engine.healthy)
        slots = max(self.spec.weights.update_strategy.max_unavailable - away, 0) if rolling else len(behind)
        if not behind:
            return moved._done(sum(1 for engine in self.members if engine.version == self.target.version))
        return WeightsPlan(
            status=moved._status("Committing", committed=len(self.members) - len(behind)),
            boot=self.target,
            restarts={engine.index: engine.start_id for engine in behind[:slots]},
        )

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
        return WeightsPlan(status=status, boot=self.target, restarts=_restarts(self.members, self.spec), events=(note,))

    def _status(self, phase: str, **changes: object) -> WeightsStatus:
        transaction = self.transaction.model_copy(update=changes)
        return self.weights.model_copy(update={"phase": phase, "transaction": transaction})


# --- shared ----------------------------------------------------------------------------------------------------


def _move(spec: Spec, transaction: WeightTransaction, until: Step) -> WeightMove:
    return WeightMove(
        id=transaction.id,
        weights=WeightVersion(transaction.version, transaction.path),
        until=until,
        pause_mode=PauseMode(spec.weights.pause_mode),
        kv_cache=KVCache(spec.weights.kv_cache),
        timeout_seconds=float(spec.weights.timeout_seconds),
    )


def _new_transaction(target: WeightVersion, generation: int, attempt: int, now: datetime) -> WeightTransaction:
    return WeightTransaction(
        id=f"g{generation}.{attempt}:{target.version}"[:128],
        version=target.version,
        path=target.path,
        generation=generation,
        started_at=timestamp(now),
    )


def _attempt(transaction: WeightTransaction) -> int:
    """The attempt of a transaction, from its id g<generation>.<attempt>:<version>."""
    return int(transaction.id.split(":", 1)[0].rsplit(".", 1)[1])


def _is_coming(engine: EngineView) -> bool:
    """Whether the engine is on its way up and nothing is known to be wrong with it."""
    report = engine.leader
    if report is None:
        return bool(engine.pods) and not engine.silent
    return not report.engine.failure and report.engine.state in (
        EngineState.ABSENT,
        EngineState.WAITING,
        EngineState.STARTING,
    )


def _has_served(members: Collection[EngineView], weights: WeightsStatus) -> bool:
    """Whether an engine was ever routable, or is up and about to be."""
    return weights.served or any(engine.record.routable or engine.version for engine in members)
