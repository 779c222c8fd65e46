"""The whole on the local cluster: two engines on CPU, a router, clients that read tokens, an operator with a standby.

What an engine needs by itself (to start, to load a checkpoint) is measured beside what we add to it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from e2e.bench import losses, machine
from e2e.bench.engine_view import PAUSED, RUNNING, EngineView, all_are
from e2e.bench.figures import Section
from e2e.bench.operator_pods import OperatorPods, add_usage
from e2e.bench.token_streams import token_streams
from e2e.bench.watched_fleet import WatchedFleet, watched
from e2e.cluster import Cluster, versions
from e2e.cluster.progress import step
from e2e.deployment import examples, site
from e2e.deployment.chart import Chart
from e2e.deployment.connection import Connection, connect
from e2e.deployment.fleet import Fleet
from e2e.sglang_cpu import environment
from sglang_rollout.api import SGLangRollout
from sglang_rollout.api.names import engine_pod_name

NAMESPACE = "rollout-bench"
FLEET = "bench"
START_SECONDS = 900.0
CLIENTS, TOKENS = 4, 400
PAUSED_SECONDS = 0.5
TAGS = ("weights", "kvCache", "cudaGraph")
PAUSE_BETWEEN = 1.0  # seconds at most, drawn anew: not in step with the operator's own periods
MODELS = ("/models/qwen3-v1", "/models/qwen3-v2")


@dataclass(frozen=True)
class Size:
    """pauses: pauses and continues. moves: of the weights. losses: of a pod and of an engine process."""

    pauses: int = 20
    moves: int = 10
    losses: int = 3
    idle_seconds: float = 60.0


async def measure(size: Size, command: str) -> Section:
    """The cluster is left up; the fleet and its namespace are removed."""
    told = {
        "Kubernetes": versions.KUBERNETES,
        "SGLang": machine.locked_version(environment.LOCK_FILE, "sglang"),
        **machine.pinned_versions("router", "smg"),
        **machine.library_versions("kopf", "aiohttp"),
    }
    section = Section("cluster", "The whole on a cluster", command, machine.describe(told))
    section.notes += [
        "kind, three nodes on this one machine: cluster, engines, router, operator and clients share its cores",
        f"two engines of one pod each, a tiny random model on CPU; one router; {CLIENTS} clients that read tokens",
        "engines are asked through the API server every 10 ms: that much later a change is seen",
    ]
    with step("cluster, images, operator"):
        where = site.with_images(site.bring_up())
        Chart(where.cluster).install(where.images)
    async with connect(where.cluster) as connection, _namespace(where.cluster):
        fleet = Fleet(connection, NAMESPACE, FLEET)
        await fleet.create(examples.load(examples.QUICKSTART, name=FLEET))
        async with watched(fleet) as seen:
            with step("two engines start"):
                await seen.ready(1, START_SECONDS)
            pods = OperatorPods.of(where.cluster)
            await _idle(section, pods, size.idle_seconds)
            await _transitions(section, connection, seen, pods, size)
            await losses.measure(section, where.cluster, connection, seen, size.losses)
        await fleet.delete()
        await fleet.until_gone()
    return section


@asynccontextmanager
async def _namespace(cluster: Cluster) -> AsyncIterator[None]:
    """Empty when the block begins, gone after it."""
    gone = ("delete", "namespace", NAMESPACE, "--ignore-not-found", "--timeout=180s")
    await asyncio.to_thread(cluster.kubectl, *gone, timeout=200)
    await asyncio.to_thread(cluster.kubectl, "create", "namespace", NAMESPACE)
    try:
        yield
    finally:
        await asyncio.to_thread(cluster.kubectl, *gone, timeout=200)


async def _idle(section: Section, pods: OperatorPods, seconds: float) -> None:
    with step(f"nothing, for {seconds:.0f} s"):
        before = await pods.measured()
        await asyncio.sleep(seconds)
        add_usage(section, f"idle for {seconds:.0f} s", before, await pods.measured())


async def _transitions(
    section: Section, connection: Connection, seen: WatchedFleet, pods: OperatorPods, size: Size
) -> None:
    """Pauses and moves of the weights under load, and what they cost the operator."""
    before = await pods.measured()
    with step(f"{size.pauses} pauses, engines idle"):
        await _pauses(section, connection, seen, size.pauses, clients=0)
    with step(f"{size.pauses} pauses, {CLIENTS} clients"):
        await _pauses(section, connection, seen, size.pauses, clients=CLIENTS)
    with step(f"{size.pauses} releases of all memory, engines idle"):
        await _releases(section, seen, size.pauses)
    with step(f"{size.moves} moves of the weights"):
        await _moves(section, connection, seen, size.moves)
    add_usage(section, "in these transitions", before, await pods.measured())


async def _pauses(section: Section, connection: Connection, seen: WatchedFleet, pauses: int, clients: int) -> None:
    engines = _engines(connection, seen)
    effects: dict[int, list[float]] = {PAUSED: [], RUNNING: []}
    ready: list[float] = []
    async with token_streams(connection, NAMESPACE, FLEET, clients, TOKENS) as streams:
        for _ in range(pauses):
            for state, readiness in (("Paused", PAUSED), ("Running", RUNNING)):
                if readiness == PAUSED:
                    await streams.more(clients)
                await asyncio.sleep(PAUSED_SECONDS + random.uniform(0.0, PAUSE_BETWEEN))
                started = time.monotonic()
                reached = asyncio.create_task(all_are(engines, readiness))
                generation = await seen.fleet.patch(execution={"state": state})
                in_status = await seen.ready(generation)
                effects[readiness].append(1e3 * (await reached - started))
                ready.append(1e3 * (in_status - started))
    load = f"{clients} clients" if clients else "engines idle"
    section.add(f"spec patch to the last engine paused, {load}", effects[PAUSED], "ms")
    section.add(f"spec patch to the last engine continued, {load}", effects[RUNNING], "ms")
    section.add(f"the same patches to Ready for their generation, {load}", ready, "ms")


async def _releases(section: Section, seen: WatchedFleet, releases: int) -> None:
    """Release and resume in turn, as status tells of each engine; the first release, which starts engines with the
    flags for it, does not count."""
    effects: dict[str, list[float]] = {"Released": [], "Resident": []}
    ready: list[float] = []
    for turn in range(1 + releases):
        for residency, state in (("Released", "Paused"), ("Resident", "Running")):
            await asyncio.sleep(PAUSED_SECONDS + random.uniform(0.0, PAUSE_BETWEEN))
            started = time.monotonic()
            memory = {**dict.fromkeys(TAGS, residency), "weightsBackup": "HostMemory"}
            generation = await seen.fleet.patch(execution={"state": state}, memory=memory)
            there = partial(_all_have, residency)
            reached = await seen.until(f"all memory {residency}", there, START_SECONDS)
            in_status = await seen.ready(generation, START_SECONDS)
            if turn:
                effects[residency].append(1e3 * (reached - started))
                ready.append(1e3 * (in_status - started))
    section.add("spec patch to all memory of the last engine released, in status", effects["Released"], "ms")
    section.add("spec patch to all memory of the last engine resumed, running, in status", effects["Resident"], "ms")
    section.add("the same patches to Ready for their generation", ready, "ms")


def _all_have(residency: str, rollout: SGLangRollout) -> bool:
    if residency == "Released":
        return all(set(engine.released) == set(TAGS) for engine in rollout.status.engines)
    return not any(engine.released or engine.paused for engine in rollout.status.engines)


async def _moves(section: Section, connection: Connection, seen: WatchedFleet, moves: int) -> None:
    """From disk, all engines at once."""
    ready: list[float] = []
    stalls: list[float] = []
    gaps: list[float] = []
    usual: list[float] = []
    async with token_streams(connection, NAMESPACE, FLEET, CLIENTS, TOKENS) as streams:
        for turn in range(1, moves + 1):
            await streams.more(CLIENTS)
            await asyncio.sleep(PAUSE_BETWEEN + random.uniform(0.0, PAUSE_BETWEEN))
            started = time.monotonic()
            generation = await seen.fleet.move_weights(f"move-{turn}", MODELS[turn % 2])
            done = await seen.ready(generation)
            await streams.more(CLIENTS)
            ready.append(done - started)
            gaps.append(streams.longest_gap(started, done, time.monotonic()))
            usual.append(streams.longest_gap(2 * started - done, started, started))
            weights = seen.seen.status.weights
            stall = weights.transaction.stall_seconds if weights and weights.transaction else None
            stalls += [] if stall is None else [float(stall)]
    section.add("weights from disk: spec patch to Ready at the new version", ready, "s")
    section.add("weights from disk: the longest pause to continue of an engine, as agents report", stalls, "s")
    section.add("weights from disk: longest time without a token for a client", gaps, "s")
    section.add("longest time without a token, in as long a time before it", usual, "s")


def _engines(connection: Connection, seen: WatchedFleet) -> list[EngineView]:
    replicas = seen.seen.spec.replicas
    return [EngineView(connection, NAMESPACE, engine_pod_name(FLEET, index, 0)) for index in range(replicas)]
