"""spec.weights.prepare: the next weights, staged beside what is served, so that their commit is only the pause."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from datetime import datetime

from ..api import Spec
from ..api.conditions import seconds_left, timestamp
from ..api.status import PreparedStatus, WeightTransaction
from ..api.weights import PreparedWeights
from ..protocol.report import MoveReport
from ..protocol.weights import Step, WeightMove
from .engines import EngineView
from .planned import soonest
from .preparation import different_bytes
from .sources import Keepers, agents_of, transfer_of
from .weight_steps import RETRY_SECONDS, MoveOrders, WeightsPlan

NAMED = 3  # engines, in a message


def staged_ahead(
    plan: WeightsPlan, members: Collection[EngineView], keepers: Keepers, spec: Spec, generation: int, now: datetime
) -> WeightsPlan:
    """`plan`, of a fleet that does not move, with the orders to stage ahead and what they have come to. generation: of
    the resource."""
    wanted, status = spec.weights.prepare, plan.status
    served = {entry.version for entry in status.history if not entry.path}
    # What a trainer sent once is not sent again by that label.
    if wanted is None or wanted.version == status.version or wanted.version in served:
        return replace(plan, status=status.model_copy(update={"prepared": None}))
    prepared = known = status.prepared
    if prepared is None or not is_prepared_from(prepared, wanted):
        prepared = PreparedStatus(
            version=wanted.version, path=_path(wanted), source=transfer_of(wanted.source), generation=generation
        )
    if prepared.failed_at is not None:
        wait = seconds_left(prepared.failed_at, RETRY_SECONDS, now)
        if wait > 0:
            return _with(plan, prepared, {}, wait)
        prepared = prepared.model_copy(update={"attempt": prepared.attempt + 1, "failed_at": None, "members": 0})
    # An engine that catches up needs its stage for that first.
    healthy = [engine for engine in members if engine.healthy and engine.index not in plan.moves]
    prepared = prepared.model_copy(
        update={"members": prepared.members or agents_of(healthy, transfer_of(wanted.source).kind)}
    )
    prepared = _judged(prepared, healthy, now)
    if prepared.failed_at:
        return _with(plan, prepared, {}, RETRY_SECONDS)
    orders = _orders(spec, wanted, prepared, keepers, plan)
    ordered = _with(plan, prepared, {engine.index: orders.order(engine, Step.PREPARE) for engine in healthy}, None)
    # Its id is written before any engine is told: a trainer sends once, and who plans next must go on with it.
    is_new = known is None or order_id(known) != order_id(prepared)
    return replace(ordered, decision=plan.decision or is_new)


def is_prepared_from(prepared: PreparedStatus, wanted: PreparedWeights) -> bool:
    """Not by the label alone: another trainer's weights of the same label may be other ones."""
    known = (prepared.version, prepared.path, prepared.source)
    return known == (wanted.version, _path(wanted), transfer_of(wanted.source))


def _path(wanted: PreparedWeights) -> str:
    return wanted.source.disk.path if wanted.source.disk else ""


def _with(
    plan: WeightsPlan, prepared: PreparedStatus, orders: dict[int, WeightMove], wake: float | None
) -> WeightsPlan:
    status = plan.status.model_copy(update={"prepared": prepared})
    return replace(plan, status=status, prepares=orders, wake=soonest(plan.wake, wake))


def _judged(prepared: PreparedStatus, engines: Collection[EngineView], now: datetime) -> PreparedStatus:
    """With what the reports say. It has failed when an engine refuses it, or when none has it and none goes on."""
    name = order_id(prepared)
    reports = {engine.index: _reports(engine, name) for engine in engines}
    done = [index for index, moves in reports.items() if moves and all(m.reached >= Step.PREPARE for m in moves)]
    roots = sorted({prepared.root} - {""} | {move.root for index in done for move in reports[index] if move.root})
    errors = [move.error for moves in reports.values() for move in moves if move.error]
    refused = [move.error for moves in reports.values() for move in moves if move.refused]
    given_up = [index for index, moves in reports.items() if any(move.error for move in moves)]
    if len(roots) > 1:
        refused.append(different_bytes(roots))
    found = prepared.model_copy(update={"engines": len(done), "root": roots[0] if roots else ""})
    if refused or (errors and not done and len(given_up) == len(reports)):
        return found.model_copy(
            update={"failed_at": timestamp(now), "message": (refused or errors)[0][:2000], "root": ""}
        )
    waits = "" if len(done) == len(reports) else (errors or [_waits_for(prepared, engines, done)])[0]
    return found.model_copy(update={"message": waits[:2000]})


def _waits_for(prepared: PreparedStatus, engines: Collection[EngineView], done: Collection[int]) -> str:
    """Which engines have yet to report it. The reason of the last failure stays in sight while it is tried again."""
    if prepared.attempt > 1 and prepared.message:
        return prepared.message
    names = [engine.name for engine in engines if engine.index not in done]
    rest = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"waiting for {', '.join(names[:NAMED])}{rest}"


def _reports(engine: EngineView, move_id: str) -> list[MoveReport]:
    """Of every pod of the engine; empty while one has not heard of it."""
    found = [report.prepare for report in engine.reports.values() if report.prepare and report.prepare.id == move_id]
    return found if len(found) == engine.nodes else []


def _orders(
    spec: Spec, wanted: PreparedWeights, prepared: PreparedStatus, keepers: Keepers, plan: WeightsPlan
) -> MoveOrders:
    as_transaction = WeightTransaction(
        id=order_id(prepared),
        version=wanted.version,
        path=prepared.path,
        source=prepared.source,
        root=prepared.root,
        epoch=plan.status.epoch,
        members=prepared.members,
    )
    return MoveOrders(spec, as_transaction, keepers)


def order_id(prepared: PreparedStatus) -> str:
    """Used once: an agent may have missed the orders between two of one label."""
    return f"ahead.g{prepared.generation}.{prepared.attempt}:{prepared.version}"[:128]
