"""A pod is killed, an engine process is killed: how long until the engine is routable again, and whose time it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from e2e.bench.engine_view import RUNNING, EngineView
from e2e.bench.figures import Section
from e2e.bench.watched_fleet import WatchedFleet
from e2e.cluster import Cluster, ClusterError
from e2e.cluster.progress import step
from e2e.deployment.connection import Connection
from e2e.deployment.errors import DeploymentError
from e2e.deployment.faults import kill_engine
from sglang_rollout.api import EngineStatus, SGLangRollout
from sglang_rollout.api.names import CONTAINER_ENGINE, engine_name, engine_pod_name
from sglang_rollout.protocol.launch import EngineRecord
from sglang_rollout.protocol.pod import ENGINE_RECORD, RUN_DIR
from sglang_rollout.protocol.wire import loads

START_SECONDS = 900.0
ASK_SECONDS = 0.05
KILL_GRACE_SECONDS = 1
RECOVERED_GOAL = "<= 2"


@dataclass(frozen=True)
class Recovery:
    """Moments in monotonic seconds. launched: our launcher starts SGLang. answering: SGLang answers /health.
    routable: the status says so, and every router has it."""

    lost: float
    launched: float
    answering: float
    routable: float


async def measure(section: Section, cluster: Cluster, connection: Connection, seen: WatchedFleet, times: int) -> None:
    """One engine at a time, the other one serves on."""
    pods, processes = [], []
    for turn in range(times):
        index = turn % seen.seen.spec.replicas
        with step(f"pod of engine {index} killed"):
            pods.append(await _pod_killed(cluster, connection, seen, index))
        # Its container is new, so the kubelet starts it again at once, without a back-off.
        with step(f"process of engine {index} killed"):
            processes.append(await _process_killed(cluster, connection, seen, index))
    _add(section, "pod killed", pods)
    _add(section, "SGLang killed in its container", processes, RECOVERED_GOAL)


def _add(section: Section, what: str, found: Sequence[Recovery], goal: str = "") -> None:
    section.add(f"{what}: to routable again", [one.routable - one.lost for one in found], "s")
    section.add(f"{what}: of this, until SGLang is being started", [one.launched - one.lost for one in found], "s")
    section.add(
        f"{what}: of this, SGLang's own start until /health", [one.answering - one.launched for one in found], "s"
    )
    ours = [one.routable - one.lost - (one.answering - one.launched) for one in found]
    section.add(f"{what}: of this, all else", ours, "s", goal)
    section.add(f"{what}: of this, from /health to routable", [one.routable - one.answering for one in found], "s")


async def _pod_killed(cluster: Cluster, connection: Connection, seen: WatchedFleet, index: int) -> Recovery:
    before = _engine(seen.seen, seen.fleet.name, index)
    lost = time.monotonic()
    await seen.fleet.delete_pod(engine_pod_name(seen.fleet.name, index, 0), grace_seconds=KILL_GRACE_SECONDS)
    return await _recovery(cluster, connection, seen, index, lost, before)


async def _process_killed(cluster: Cluster, connection: Connection, seen: WatchedFleet, index: int) -> Recovery:
    before = _engine(seen.seen, seen.fleet.name, index)
    pod = await seen.fleet.pod(index)
    # The kill takes a second to arrive in the pod: the engine is lost when its answers end.
    killing = asyncio.create_task(asyncio.to_thread(kill_engine, cluster, pod))
    lost = await _view(connection, seen, index).is_lost(60.0)
    await killing
    return await _recovery(cluster, connection, seen, index, lost, before)


async def _recovery(
    cluster: Cluster, connection: Connection, seen: WatchedFleet, index: int, lost: float, before: EngineStatus
) -> Recovery:
    launched = await _launched(cluster, seen, index, before.start_id)
    answering = asyncio.create_task(
        _view(connection, seen, index).answers("/health", RUNNING, START_SECONDS, ASK_SECONDS)
    )

    def routable(one: SGLangRollout) -> bool:
        engine = _engine(one, seen.fleet.name, index)
        return (
            engine.routable and engine.start_id != before.start_id and one.status.routable_replicas == one.spec.replicas
        )

    back = await seen.until(f"engine {index} to be routable again", routable, START_SECONDS)
    return Recovery(lost, launched, await answering, back)


async def _launched(cluster: Cluster, seen: WatchedFleet, index: int, before: str) -> float:
    """When SGLang was started anew, as its launcher has written down."""
    name = engine_pod_name(seen.fleet.name, index, 0)
    file = f"{RUN_DIR}/{ENGINE_RECORD}"
    words = ("-n", seen.fleet.namespace, "exec", name, "-c", CONTAINER_ENGINE, "--", "cat", file)
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            shown = await asyncio.to_thread(cluster.kubectl, *words)
        except ClusterError:
            shown = ""  # not there yet
        if shown:
            record = loads(EngineRecord, shown)
            if record.start_id != before:
                return datetime.fromisoformat(record.started_at).timestamp() - time.time() + time.monotonic()
        await asyncio.sleep(1.0)
    raise DeploymentError(f"{name} has not started SGLang in {START_SECONDS:.0f} s")


def _view(connection: Connection, seen: WatchedFleet, index: int) -> EngineView:
    return EngineView(connection, seen.fleet.namespace, engine_pod_name(seen.fleet.name, index, 0))


def _engine(rollout: SGLangRollout, fleet: str, index: int) -> EngineStatus:
    for one in rollout.status.engines:
        if one.name == engine_name(fleet, index):
            return one
    raise DeploymentError(f"status.engines has no engine {index}")
