"""One-shot operations over the fleet: what was asked for by a request id, and what engines are to be told of it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime

from ..api import SGLangRollout, WeightsStatus
from ..api.status import RequestStatus, WeightCheckStatus
from ..protocol.operations import Operation
from .engines import EngineView
from .planned import EventNote
from .requests import Requests
from .weight_checks import WeightChecks


@dataclass(frozen=True)
class OperationsPlan:
    """The last request of each kind, for status. asked: by engine index. resetting: engines whose weights are about to
    be overwritten: they leave the routers first, and are told only when no router has them."""

    check: WeightCheckStatus | None = None
    profile: RequestStatus | None = None
    flush_cache: RequestStatus | None = None
    abort_requests: RequestStatus | None = None
    asked: dict[int, list[Operation]] = field(default_factory=dict)
    resetting: frozenset[int] = frozenset()
    events: tuple[EventNote, ...] = ()
    wake: float | None = None


def advance(
    rollout: SGLangRollout,
    engines: Collection[EngineView],
    weights: WeightsStatus,
    unregistered: frozenset[int],
    now: datetime,
) -> OperationsPlan:
    """Where the requests of spec stand, and what engines are to be told."""
    members = [engine for engine in engines if engine.wanted]
    quiet = weights.phase in ("Idle", "Failed")
    check = WeightChecks(rollout, members, weights, quiet, unregistered, now).advance()
    requests = Requests(rollout, members, quiet, now)
    profile, flush, abort = requests.profile(), requests.flush_cache(), requests.abort_requests()
    # In this order on the engine, too: an abort frees the cache that is to be flushed.
    kinds = (abort, flush, check, profile)
    asked = {e.index: [kind.asked[e.index] for kind in kinds if e.index in kind.asked] for e in members}
    return OperationsPlan(
        check=check.status,
        profile=profile.status,
        flush_cache=flush.status,
        abort_requests=abort.status,
        asked={index: orders for index, orders in asked.items() if orders},
        resetting=check.resetting,
        events=tuple(event for kind in kinds for event in kind.events),
        wake=min((kind.wake for kind in kinds if kind.wake is not None), default=None),
    )
