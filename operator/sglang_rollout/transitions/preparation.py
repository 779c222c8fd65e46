"""A move of the fleet before its decision: engines check the checkpoint, and what they say adds up to one answer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import datetime

from ..api import Spec, WeightsStatus
from ..api.conditions import seconds_left, timestamp
from ..api.status import PreparedStatus, TransferStatus, WeightTransaction
from ..protocol.report import EngineState
from ..protocol.weights import Step, WeightVersion
from .engines import EngineView
from .planned import EventNote
from .sources import Keepers, agents_of, transfer_of
from .weight_steps import RETRY_SECONDS, MoveOrders, WeightsPlan, settle, transaction_id


@dataclass(frozen=True)
class Preparation:
    """A move to `target` that is not decided. routers_in_step: every router has exactly the engines that are to be
    registered now."""

    members: list[EngineView]
    keepers: Keepers
    spec: Spec
    weights: WeightsStatus
    target: WeightVersion
    generation: int
    now: datetime
    routers_in_step: bool

    @property
    def _transfer(self) -> TransferStatus:
        """How spec says that the target comes; what was staged ahead only has to be found."""
        return TransferStatus(kind="Kept") if self._ahead else transfer_of(self.spec.weights.source)

    @property
    def _ahead(self) -> str:
        """Digest of the target where it was staged ahead of this move and still is."""
        prepared = self._prepared
        return prepared.root if prepared and any(prepared.root in engine.staged for engine in self.members) else ""

    @property
    def _prepared(self) -> PreparedStatus | None:
        """What was staged ahead, if it is what spec asks for now: the label alone does not say so."""
        prepared = self.weights.prepared
        if prepared is None or WeightVersion(prepared.version, prepared.path) != self.target:
            return None
        return prepared if prepared.source == transfer_of(self.spec.weights.source) else None

    def plan(self) -> WeightsPlan:
        transaction = self.weights.transaction
        # A change of something else does not begin an open move anew: that would be for ever, if changes are frequent.
        same = transaction is not None and self._is_of_target(transaction)
        if transaction is None or not same or (transaction.completed_at and transaction.generation != self.generation):
            return self._begin()
        if transaction.completed_at is not None:
            return self._try_again(transaction, transaction.completed_at)
        return self._judge(transaction)

    def _is_of_target(self, transaction: WeightTransaction) -> bool:
        asked = transfer_of(self.spec.weights.source)
        way = (TransferStatus(kind="Kept"), asked) if self._prepared else (asked,)
        same = (transaction.version, transaction.path) == (self.target.version, self.target.path)
        return same and transaction.source in way

    def _begin(self) -> WeightsPlan:
        transaction = self._transaction(1)
        if reason := _relabelled(self.weights, self.target):
            return self._fail(transaction, reason)
        text = f"preparing version {self.target.version}{_origin(transaction)}"
        note = EventNote("Normal", "WeightsStaging", text)
        return replace(self._opened(transaction, "Staging"), events=(note,))

    def _try_again(self, failed: WeightTransaction, failed_at: str) -> WeightsPlan:
        wait = seconds_left(failed_at, RETRY_SECONDS, self.now)
        if wait > 0:
            plan = self._failed(self.weights)
            return replace(plan, wake=wait if plan.wake is None else min(wait, plan.wake))
        if _relabelled(self.weights, self.target):
            return replace(self._failed(self.weights), wake=None)
        # The reason of the last failure stays in sight while it is tried again.
        again = self._transaction(_attempt(failed) + 1).model_copy(update={"message": failed.message})
        return self._opened(again, "Failed")

    def _opened(self, transaction: WeightTransaction, phase: str) -> WeightsPlan:
        """Its id is written before any engine is told: a trainer sends once, and who plans next must go on with it."""
        return replace(self._preparing(transaction, phase), decision=True)

    def _judge(self, transaction: WeightTransaction) -> WeightsPlan:
        """What the reports of the preparing engines add up to."""
        candidates = self._able([engine for engine in self.members if engine.healthy], transaction)
        refusals = [engine.move_error(transaction.id) for engine in candidates if engine.move_refused(transaction.id)]
        if refusals:
            return self._fail(transaction, refusals[0])
        prepared = [engine for engine in candidates if engine.progress(transaction.id) >= Step.PREPARE]
        roots = sorted({transaction.root} - {""} | {root for e in prepared for root in e.roots(transaction.id)})
        if len(roots) > 1:
            return self._fail(transaction, different_bytes(roots))
        transaction = transaction.model_copy(
            update={"prepared": len(prepared), "root": roots[0] if roots else "", **staging(candidates, transaction.id)}
        )
        left = seconds_left(transaction.started_at, self.spec.weights.timeout_seconds, self.now)
        if candidates and len(prepared) == len(candidates):
            return self._decide(transaction)
        if not candidates and self.target.path and not any(_is_coming(engine) for engine in self.members):
            return self._decide(transaction)
        errors = [error for engine in candidates if (error := engine.move_error(transaction.id))]
        if left <= 0:
            if prepared:
                return self._decide(transaction)
            return self._fail(transaction, errors[0] if errors else "no engine was ready to prepare it in time")
        if not prepared and candidates and len(errors) == len(candidates):
            return self._fail(transaction, errors[0])
        # Those that failed alone have what the others hold until then.
        phase = "Failed" if _attempt(transaction) > 1 else "Staging"
        return replace(self._preparing(transaction, phase), wake=left)

    @staticmethod
    def _able(engines: list[EngineView], transaction: WeightTransaction) -> list[EngineView]:
        """Without those that have no use of their stage, if others have and the weights come no other way: one broken
        pod must not keep the fleet where it is."""
        if transaction.path or transaction.source.kind not in ("Staged", "Kept"):
            return engines
        return [engine for engine in engines if not engine.stage_problem] or engines

    def _preparing(self, transaction: WeightTransaction, phase: str) -> WeightsPlan:
        settled = settle(self.members, self.keepers, self.spec, self.weights, phase, self.now, busy=transaction)
        # One that catches up first comes too late for the trainer, and has it from the others.
        preparing = [engine for engine in self.members if engine.healthy and engine.index not in settled.moves]
        if not transaction.members:
            members = agents_of(self._able(preparing, transaction), transaction.source.kind)
            transaction = transaction.model_copy(update={"members": members})
            settled = replace(settled, status=settled.status.model_copy(update={"transaction": transaction}))
        orders = MoveOrders(self.spec, transaction, self.keepers)
        moves = {engine.index: orders.order(engine, Step.PREPARE) for engine in preparing}
        # An engine that no other way leads to the committed version may go to the next one with the others.
        return replace(settled, moves={**settled.moves, **moves})

    def _decide(self, transaction: WeightTransaction) -> WeightsPlan:
        rolling = self.spec.weights.update_strategy.type == "Rolling"
        parting = self._left_behind(transaction) if rolling else frozenset()
        if rolling and not self.routers_in_step:
            # The decision takes an allowed version away: what no router may have after it must have left them before.
            return replace(self._preparing(transaction, "Prepared"), parting=parting)
        decided = transaction.model_copy(
            update={"decision": "Commit", "decided_at": timestamp(self.now), "message": ""}
        )
        plan = self._preparing(decided, "Committing")
        note = EventNote("Normal", "WeightsCommitting", f"{transaction.prepared} engines move to {transaction.version}")
        status = plan.status
        if rolling:
            # Both versions serve while the waves go on: the old one is behind by one from now.
            status = status.with_committed(transaction.version, transaction.path, self.now, transaction.root)
        return replace(plan, status=status, decision=True, parting=parting, events=(note,), wake=0.0)

    def _left_behind(self, transaction: WeightTransaction) -> frozenset[int]:
        """Engines that may serve now and will be further behind than is allowed once this version is committed."""
        return frozenset(
            engine.index
            for engine in self.members
            if engine.version != transaction.version
            and (self.weights.lag(engine.version) or 0) + 1 > self.spec.staleness.max_version_lag
        )

    def _fail(self, transaction: WeightTransaction, reason: str) -> WeightsPlan:
        ended = transaction.model_copy(
            update={"decision": "Abort", "completed_at": timestamp(self.now), "message": reason[:2000]}
        )
        plan = self._failed(self.weights.model_copy(update={"transaction": ended}))
        first = _attempt(transaction) == 1
        text = f"version {transaction.version} is refused, {self.weights.version} keeps serving: {reason}"
        events = (EventNote("Warning", "WeightsRefused", text),) if first else ()
        return replace(plan, events=events, wake=RETRY_SECONDS)

    def _failed(self, weights: WeightsStatus) -> WeightsPlan:
        return settle(self.members, self.keepers, self.spec, weights, "Failed", self.now)

    def _transaction(self, attempt: int) -> WeightTransaction:
        return WeightTransaction(
            id=transaction_id(f"g{self.generation}.{attempt}", self.target.version),
            version=self.target.version,
            path=self.target.path,
            source=self._transfer,
            root=self._ahead,
            epoch=self.weights.epoch,
            generation=self.generation,
            started_at=timestamp(self.now),
        )


def _origin(transaction: WeightTransaction) -> str:
    """Where the weights come from, for people."""
    if transaction.path:
        return f" from {transaction.path}"
    senders = transaction.source.senders
    return f" from a trainer at {', '.join(senders[:3])}" if senders else " from a trainer"


def different_bytes(roots: Collection[str]) -> str:
    return f"engines were given different bytes ({' and '.join(root[:12] for root in roots)})"


def staging(engines: Collection[EngineView], move_id: str) -> dict[str, int]:
    """Progress in bytes of the engine that is furthest behind, for a transaction."""
    moves = [move for engine in engines for move in engine.moves(move_id) if move is not None]
    return {
        "staged_bytes": min((move.staged_bytes for move in moves), default=0),
        "of_bytes": max((move.of_bytes for move in moves), default=0),
        "non_finite": max((move.nonfinite for move in moves), default=0),
    }


def _relabelled(weights: WeightsStatus, target: WeightVersion) -> str:
    """Why this label cannot be used for these bytes: it was used for others, and engines or a trainer's records may
    still know it as those. Empty: it can."""
    if not target.path and any(entry.version == target.version for entry in weights.history):
        return f"version {target.version} was served before: give what the trainer sends now a label of its own"
    other = [e.path for e in weights.history if e.version == target.version and e.path not in ("", target.path)]
    if not other:
        return ""
    return f"version {target.version} was served from {other[0]}: give {target.path} a label of its own"


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
