"""Engines that start when no folder has what the fleet serves: they get it from their own stage or from a peer's, and
no request before they have it."""

from __future__ import annotations

import asyncio
import time

import pytest

from e2e.cluster import Cluster
from e2e.deployment import answers
from e2e.deployment.chart import Chart
from e2e.deployment.connection import core_path
from e2e.deployment.faults import kill_container, kill_engine
from e2e.deployment.fleet import Fleet
from e2e.deployment.plugin import Plugin
from e2e.fleet.journal import Journal
from e2e.fleet.weights.checksums import checksum
from e2e.fleet.weights.conftest import START_SECONDS, Load
from e2e.fleet.weights.fault_file import FaultFile
from e2e.fleet.weights.trainer import Trainer
from sglang_rollout.api import SGLangRollout

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


async def published(trainer: Trainer, journal: Journal) -> str:
    """A version that lies in no folder serves; its checkpoint's name."""
    label, _ = journal.next()
    told = await trainer.publish(label, journal.models[label])
    assert told.state == "done", told
    return journal.models[label]


async def returned(fleet: Fleet, index: int, before: str) -> None:
    """Until the engine is routable with another process than `before`."""

    def back(one: SGLangRollout) -> bool:
        engine = one.status.engines[index]
        return engine.routable and engine.start_id not in ("", before)

    await fleet.until("the engine's return", back, timeout=START_SECONDS)


async def test_a_new_pod_gets_the_weights_from_its_peer(
    fleet: Fleet, trainer: Trainer, load: Load, journal: Journal, plugin: Plugin, checksums: dict[str, str]
) -> None:
    async with load() as seen:
        model = await published(trainer, journal)
        await fleet.until_serving(journal.current, timeout=10)
        before = (await fleet.engine(1)).start_id
        await fleet.delete_pod("sync-e1-0")
        await returned(fleet, 1, before)
        await fleet.until_serving(journal.current, timeout=60)
        await seen.more(8, version=journal.current)
    assert answers.failures(seen.answers) == []
    assert await checksum(fleet, plugin) == checksums[model]


async def test_a_restarted_engine_finds_the_weights_in_its_own_stage(
    fleet: Fleet,
    trainer: Trainer,
    load: Load,
    journal: Journal,
    plugin: Plugin,
    checksums: dict[str, str],
    cluster: Cluster,
) -> None:
    async with load() as seen:
        model = await published(trainer, journal)
        before = [(await fleet.engine(index)).start_id for index in (0, 1)]
        # Both at once: nobody serves meanwhile, and each has only what its own pod keeps.
        for index in (0, 1):
            await asyncio.to_thread(kill_engine, cluster, await fleet.pod(index))
        for index in (0, 1):
            await returned(fleet, index, before[index])
        healed = time.monotonic()
        await seen.more(8, version=journal.current)
    assert answers.failures(seen.since(healed)) == []
    assert await checksum(fleet, plugin) == checksums[model]


async def test_a_leader_killed_after_the_decision_leaves_it_to_the_standby(
    fleet: Fleet, trainer: Trainer, load: Load, journal: Journal, cluster: Cluster, chart: Chart
) -> None:
    leader = await asyncio.to_thread(chart.leader)
    pod = await fleet.connection.get(core_path(chart.namespace, "pods", leader))
    fault = FaultFile(cluster, fleet.namespace, fleet.name, 1)
    async with load() as seen:
        label, _ = journal.next()
        async with fault.holding("pause:before"):
            job = await trainer.begin(label, journal.models[label])
            await fault.held()
            decided = (await fleet.read()).status.weights
            assert decided is not None
            assert decided.transaction is not None
            assert (decided.transaction.version, decided.transaction.decision) == (label, "Commit")
            await asyncio.to_thread(kill_container, cluster, pod, "operator")
        told = await job.ended()
        assert told.state == "done", told
        await fleet.until_serving(label, timeout=60)
        await seen.more(4, version=label)
    assert answers.failures(seen.answers) == []
    assert await asyncio.to_thread(chart.leader) != leader
