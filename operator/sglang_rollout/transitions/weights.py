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

import hashlib
from collections.abc import Collection
from dataclasses import replace
from datetime import datetime

from ..api import Spec, WeightsStatus
from ..protocol.weights import Step, WeightVersion
from .ahead import staged_ahead
from .commit import Commit
from .engines import EngineView
from .preparation import Preparation
from .sources import Keepers
from .versions import boot_version, bootable_version, committed_version, target_version
from .weight_steps import WeightsPlan, settle


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
    weights = _with_epoch(weights, members)
    known = {"version": committed.version, "target_version": target.version, "served": _has_served(members, weights)}
    weights = weights.model_copy(update=known)
    keepers = Keepers(engines)
    transaction = weights.transaction
    is_open = transaction is not None and transaction.completed_at is None
    if transaction is not None and is_open and transaction.decision == "Commit":
        # An engine that is not wanted any more and takes part comes through first.
        parting = [e for e in engines if not e.wanted and e.progress(transaction.id) >= Step.PREPARE]
        taking_part, everyone = [*members, *parting], tuple(engines)
        return Commit(taking_part, everyone, keepers, spec, weights, transaction, now, routers_in_step).plan()
    if target.version == committed.version:
        settled = settle(members, keepers, spec, weights, "Idle", now)
        return staged_ahead(settled, members, keepers, spec, generation, now)
    if spec.weights.source is not None and spec.weights.source.type == "External":
        return _moved_by_others(members, keepers, spec, weights, target, now, routers_in_step)
    if not weights.served and target.path:
        # Nothing was ever served, so there is nothing to protect: the fleet starts at the target instead.
        fresh = weights.model_copy(update={"history": (), "transaction": None, "phase": "Idle"})
        fresh = fresh.with_committed(target.version, target.path, now).model_copy(update={"version": target.version})
        return settle(members, keepers, spec, fresh, "Idle", now)
    return Preparation(members, keepers, spec, weights, target, generation, now, routers_in_step).plan()


def _moved_by_others(
    members: Collection[EngineView],
    keepers: Keepers,
    spec: Spec,
    weights: WeightsStatus,
    target: WeightVersion,
    now: datetime,
    routers_in_step: bool,
) -> WeightsPlan:
    """Somebody else puts the target into the engines. One that has it leaves the routers, and all come back together
    when every engine that is up has it."""
    up = [engine for engine in members if engine.movable]
    there = frozenset(engine.index for engine in up if engine.version == target.version)
    if up and len(there) == len(up) and routers_in_step:
        done = settle(members, keepers, spec, weights.with_committed(target.version, "", now), "Idle", now)
        return replace(done, decision=True)  # written before the routers have others than now: it is not told by those
    others = [engine for engine in members if engine.index not in there]
    return settle(others, keepers, spec, weights, "Staging", now)


def _with_epoch(weights: WeightsStatus, members: Collection[EngineView]) -> WeightsStatus:
    """The epoch of these members: a new one when a pod has come or gone."""
    pods = sorted(uid for engine in members for uid in engine.pod_uids)
    membership = hashlib.sha256(" ".join(pods).encode()).hexdigest()[:16]
    if membership == weights.membership:
        return weights
    return weights.model_copy(update={"membership": membership, "epoch": weights.epoch + 1})


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
    status = weights.model_copy(update={"version": newest, "target_version": newest, "phase": "Idle"})
    return WeightsPlan(status=status, boot=bootable_version(weights))


def _trained(weights: WeightsStatus, version: str) -> str:
    """`version` if only the trainer can have put it there; what engines start from is no sign of a wish."""
    return next((entry.version for entry in weights.history if entry.version == version and not entry.path), "")


def _has_served(members: Collection[EngineView], weights: WeightsStatus) -> bool:
    """Whether an engine was ever routable, or is up and about to be."""
    return weights.served or any(engine.record.routable or engine.version for engine in members)
