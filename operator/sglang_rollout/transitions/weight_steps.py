"""What a step of the weights is, and what engines do alone: keep to the committed version, or catch up with it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime
from urllib.parse import quote

from ..api import Spec, WeightsStatus
from ..api.conditions import timestamp
from ..api.status import WeightTransaction
from ..protocol.memory import MemoryTag
from ..protocol.weights import KVCache, PauseMode, Source, Step, Verify, WeightMove, WeightVersion
from .engines import EngineView
from .planned import EventNote
from .sources import Keepers, kept_source, peers_for, senders_for, transaction_source
from .versions import bootable_version, committed_version

# A refused checkpoint may be one that is still being written.
RETRY_SECONDS = 30.0


@dataclass(frozen=True)
class WeightsPlan:
    """moves: by engine index. holds: engines in the barrier, registered although they serve an old version (they
    are paused or will be before anything new serves). closed: no engine may be newly registered now.
    engaged: engines that must not be taken away now, since the others count on them.
    parting: engines that a decision would leave too far behind: they leave the routers before it.
    restarts: start ids of engines to be ended, by index; they leave the routers, and those that are well end only when
    no router has them. decision: status holds a new decision.
    stranded: engines that hold another version than the committed one, which nobody has any more.
    prepares: weights to stage ahead, by engine index."""

    status: WeightsStatus
    boot: WeightVersion
    moves: dict[int, WeightMove] = field(default_factory=dict)
    holds: frozenset[int] = frozenset()
    closed: bool = False
    engaged: frozenset[int] = frozenset()
    parting: frozenset[int] = frozenset()
    restarts: dict[int, str] = field(default_factory=dict)
    decision: bool = False
    stranded: frozenset[int] = frozenset()
    prepares: dict[int, WeightMove] = field(default_factory=dict)
    events: tuple[EventNote, ...] = ()
    wake: float | None = None


def settle(
    members: Collection[EngineView],
    keepers: Keepers,
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
    stranded: set[int] = set()
    restarts = stuck_engines(members, spec, bootable=bool(committed.path))
    for engine in members:
        move = engine.leader.move if engine.leader else None
        if spec.engine.pipeline_parallel_size > 1 and engine.movable and engine.version != committed.version:
            restarts[engine.index] = engine.start_id  # its weights cannot be changed while it runs
        elif (engine.movable and engine.version != committed.version) or _is_worth_a_repair(engine, spec, committed):
            if order := catch_up(spec, engine, keepers, weights, now):
                moves[engine.index] = order
            else:
                stranded.add(engine.index)
        elif move is not None and move.reached in (Step.NONE, Step.PREPARE) and busy is None and not move.aborted:
            moves[engine.index] = _give_up_order(spec, committed, move.id)
        elif engine.healthy and move is not None and Step.PREPARE < move.reached < Step.CONTINUE:
            # A move that was under way when its transaction ended is brought to its end: these weights are in.
            moves[engine.index] = _catch_up_order(spec, engine, committed, Source(), now)
    transaction = busy if busy is not None else weights.transaction
    if busy is None and transaction is not None and transaction.completed_at is None:
        transaction = transaction.model_copy(update={"decision": "Abort", "completed_at": timestamp(now)})
    status = weights.model_copy(update={"phase": phase, "transaction": transaction})
    ended = any(_has_ended(e, moves[e.index].id) for e in members if e.index in moves)
    wake = RETRY_SECONDS if ended else None
    return WeightsPlan(
        status=status,
        boot=bootable_version(weights),
        moves=moves,
        restarts=restarts,
        stranded=frozenset(stranded),
        wake=wake,
    )


def catch_up(
    spec: Spec, engine: EngineView, keepers: Keepers, weights: WeightsStatus, now: datetime
) -> WeightMove | None:
    """This engine's move to the committed version, alone; None when nobody has its bytes any more."""
    source = kept_source(weights.history[-1], engine, keepers)
    return None if source is None else _catch_up_order(spec, engine, committed_version(weights), source, now)


def _catch_up_order(
    spec: Spec, engine: EngineView, committed: WeightVersion, source: Source, now: datetime
) -> WeightMove:
    return WeightMove(
        id=_catch_up_id(engine, committed, now),
        weights=committed,
        until=Step.CONTINUE,
        pause_mode=PauseMode(spec.weights.pause_mode),
        kv_cache=KVCache(spec.weights.kv_cache),
        timeout_seconds=float(spec.weights.timeout_seconds),
        source=source,
        verify=Verify(spec.weights.verify),
    )


def _catch_up_id(engine: EngineView, committed: WeightVersion, now: datetime) -> str:
    """The same while it goes on; another one from time to time after it was refused or given up, to try again."""
    name = _catch_up_name(engine, committed)
    move = engine.leader.move if engine.leader else None
    if move is None or move.id.split("#")[0] != name:
        return name
    return f"{name}#{int(now.timestamp() // RETRY_SECONDS)}" if move.error or move.aborted else move.id


def _catch_up_name(engine: EngineView, committed: WeightVersion) -> str:
    # Labels may hold what separates the parts.
    what = [quote(part, safe="") for part in (committed.version, engine.void) if part]
    return ":".join([f"catch-up:{engine.start_id}", *what])


def _is_worth_a_repair(engine: EngineView, spec: Spec, committed: WeightVersion) -> bool:
    """failurePolicy KeepGated leaves an engine of unknown bytes alone, until the fleet is at another version than that
    which failed on it."""
    move = engine.leader.move if engine.leader else None
    if spec.weights.failure_policy != "KeepGated" or not (engine.serving and engine.dirty) or move is None:
        return False
    if not move.id or MemoryTag.WEIGHTS in engine.released:
        return False
    of_the_fleet = transaction_id(move.id.split(":", 1)[0], committed.version)
    return move.id != of_the_fleet and move.id.split("#")[0] != _catch_up_name(engine, committed)


def transaction_id(attempt: str, version: str) -> str:
    """attempt: g<generation>.<number>."""
    return f"{attempt}:{version}"[:128]


def _has_ended(engine: EngineView, move_id: str) -> bool:
    """The engine will not take this move further: it was refused, or given up on late knowledge."""
    return engine.move_refused(move_id) or any(move is not None and move.aborted for move in engine.moves(move_id))


def _give_up_order(spec: Spec, committed: WeightVersion, move_id: str) -> WeightMove:
    return WeightMove(move_id, committed, Step.PREPARE, PauseMode(spec.weights.pause_mode), abort=True)


def stuck_engines(members: Collection[EngineView], spec: Spec, bootable: bool) -> dict[int, str]:
    """Engines whose weights nobody can vouch for, and those that cannot move while they run. bootable: the version to
    catch up with lies in a folder, so that a new process has it from its start. One whose checksum differs is never
    kept: when the others have moved on, nothing would tell it from a good one."""
    stuck = {engine.index: engine.start_id for engine in members if engine.unlike and engine.start_id}
    if spec.weights.failure_policy == "KeepGated":
        return stuck
    for engine in members:
        catching_up = f"catch-up:{engine.start_id}:"
        move = engine.leader.move if engine.leader else None
        failed = move is not None and move.id.startswith(catching_up) and move.error and not move.refused
        # Bytes that did not come are asked for again: a new process would need them as well.
        unmoved = move is not None and move.reached < Step.PREPARE and not bootable
        if engine.start_id and (engine.dirty or (failed and not unmoved)):
            stuck[engine.index] = engine.start_id
    return stuck


class MoveOrders:
    """What engines are told of a move of the fleet; made once for all that are told the same."""

    def __init__(self, spec: Spec, transaction: WeightTransaction, keepers: Keepers) -> None:
        self._spec = spec
        self._transaction = transaction
        self._keepers = keepers
        self._made: dict[tuple[Step, tuple[str, ...], tuple[str, ...]], WeightMove] = {}

    def order(self, engine: EngineView, until: Step) -> WeightMove:
        senders = senders_for(self._transaction, engine)
        peers = tuple(peers_for(self._transaction, engine, self._keepers))
        key = until, senders, peers
        if key not in self._made:
            self._made[key] = self._make(until, senders, peers)
        return self._made[key]

    def _make(self, until: Step, senders: tuple[str, ...], peers: tuple[str, ...]) -> WeightMove:
        transaction, wanted = self._transaction, self._spec.weights
        return WeightMove(
            id=transaction.id,
            weights=WeightVersion(transaction.version, transaction.path),
            until=until,
            pause_mode=PauseMode(wanted.pause_mode),
            kv_cache=KVCache(wanted.kv_cache),
            timeout_seconds=float(wanted.timeout_seconds),
            source=transaction_source(transaction, senders, peers, wanted.allow_non_finite),
            verify=Verify(wanted.verify),
        )
