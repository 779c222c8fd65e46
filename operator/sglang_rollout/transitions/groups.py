"""The pods of one engine live and die together: which pods are its present incarnation, and when it starts anew.

The incarnation is a set of pod UIDs, kept in status. A pod of the set that is gone breaks the group, whether or not
its StatefulSet has already replaced it (delete events can be missed, UIDs cannot): the survivors are deleted, and
only when every pod is new does the next incarnation begin. Replacements that come early wait, since no launcher of a
multi-node engine starts without an assignment. An engine process that restarts in place is a new incarnation too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from ..api.conditions import parse_timestamp, seconds_left, timestamp
from ..api.recovery import RestartPolicy
from ..protocol.desired import GroupAssignment
from .engines import EngineView
from .observed import PodView

# A delete that was ordered is seen in the caches well within this time; one order counts as one restart.
DELETES_SHOW_WITHIN = timedelta(seconds=5)


@dataclass(frozen=True)
class GroupState:
    """assignment: None until the group is whole. deletes: survivors of a broken group, to go together.
    wake: seconds until the back-off ends."""

    incarnation: int
    pod_uids: tuple[str, ...]
    start_id: str
    restarts: int
    restarted_at: str | None
    assignment: GroupAssignment | None = None
    deletes: tuple[PodView, ...] = ()
    exhausted: bool = False
    message: str = ""
    wake: float | None = None

    @property
    def whole(self) -> bool:
        return self.assignment is not None


def advance(engine: EngineView, policy: RestartPolicy, now: datetime) -> GroupState:
    """The group of `engine` as it is to be recorded, and what brings it further."""
    record = engine.record
    kept = GroupState(
        incarnation=record.incarnation,
        pod_uids=record.pod_uids,
        start_id=record.start_id,
        restarts=_counted_restarts(engine, policy, now),
        restarted_at=record.restarted_at,
    )
    if not record.pod_uids:
        return _begin(engine, kept) if engine.complete else replace(kept, message=_missing(engine))
    if engine.complete and set(engine.pod_uids) == set(record.pod_uids):
        return _assign(engine, _noticed_start(engine, kept))
    survivors = tuple(pod for pod in engine.pods.values() if pod.uid in record.pod_uids)
    if survivors:
        return _recreate(engine, kept, survivors, policy, now)
    return _begin(engine, kept) if engine.complete else replace(kept, message=_missing(engine))


def restart_delay(restarts: int, policy: RestartPolicy) -> timedelta:
    """Wait before the next restart when `restarts` were made: none before the first, then doubling."""
    if restarts == 0:
        return timedelta(0)
    # 2**32 seconds is beyond any allowed maximum: the bound keeps the number small.
    seconds: int = policy.base_delay_seconds * 2 ** min(restarts - 1, 32)
    return timedelta(seconds=min(seconds, policy.max_delay_seconds))


def _begin(engine: EngineView, state: GroupState) -> GroupState:
    # Above what any agent was told: a status restored from a backup must not lead to a number used before. But when
    # all of them were told the same, it is the number of this very group, which no status tells yet.
    told = [report.incarnation for report in engine.reports.values()]
    known = max([state.incarnation, *told])
    begun = known > state.incarnation and told.count(known) == engine.nodes
    number = known if begun else known + 1
    return _assign(engine, replace(state, incarnation=number, pod_uids=engine.pod_uids, start_id=engine.start_id))


def _noticed_start(engine: EngineView, state: GroupState) -> GroupState:
    start = engine.start_id
    if not start or start == state.start_id:
        return state
    grown = 1 if state.start_id else 0
    return replace(state, start_id=start, incarnation=state.incarnation + grown)


def _assign(engine: EngineView, state: GroupState) -> GroupState:
    rank0 = engine.pods[0]
    pods = list(engine.pod_uids) if engine.nodes > 1 else []
    return replace(state, assignment=GroupAssignment(state.incarnation, rank0.uid, rank0.ip, pods))


def _recreate(
    engine: EngineView, state: GroupState, survivors: tuple[PodView, ...], policy: RestartPolicy, now: datetime
) -> GroupState:
    lost = len(state.pod_uids) - len(survivors)
    what = f"{lost} of {len(state.pod_uids)} pods of the group are gone"
    if policy.type == "None":
        return replace(state, message=f"{what}; restartPolicy.type None leaves the others: delete them to start anew")
    if state.restarts >= policy.max_restarts:
        text = f"{what}; after {state.restarts} restarts its pods are kept for debugging: delete them to start anew"
        return replace(state, exhausted=True, message=text)
    if state.restarted_at is not None:
        pause = max(restart_delay(state.restarts, policy), DELETES_SHOW_WITHIN)
        wait = seconds_left(state.restarted_at, pause.total_seconds(), now)
        if wait > 0:
            return replace(state, message=f"{what}; the group is recreated after a back-off", wake=wait)
    return replace(
        state,
        deletes=survivors,
        restarts=state.restarts + 1,
        restarted_at=timestamp(now),
        message=f"{what}; recreating the whole group",
    )


def _counted_restarts(engine: EngineView, policy: RestartPolicy, now: datetime) -> int:
    record = engine.record
    if record.restarted_at is None or not engine.ready:
        return record.restarts
    well_since = parse_timestamp(record.restarted_at) + timedelta(seconds=policy.reset_after_seconds)
    return 0 if now >= well_since else record.restarts


def _missing(engine: EngineView) -> str:
    waiting = [
        f"{engine.name}-{rank}" for rank in range(engine.nodes) if rank not in engine.pods or not engine.pods[rank].ip
    ]
    return f"waiting for pod {', '.join(waiting)}"
