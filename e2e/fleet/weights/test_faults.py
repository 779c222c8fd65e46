"""Every part of a fleet killed at every step of a transaction, on real engines under load.

After each: the fleet is Ready at the version that the transaction came to, SGLang's checksum of all engines is that of
an engine started from this checkpoint, never did two versions serve at once, no answer was of an older version than
one before it, and nothing took longer than the transaction's timeout. `make e2e` tries the cells that differ most,
`make chaos` the others.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

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
from e2e.fleet.weights.conftest import START_SECONDS, TIMEOUT_SECONDS, Load
from e2e.fleet.weights.fault_file import FaultFile
from e2e.fleet.weights.trainer import Job, Trainer

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

STEPS = (
    "stage:begin", "stage:mid", "stage:end", "pause:before", "pause:after", "flush:after", "check:after", "apply:begun",
    "apply:written", "apply:labelled", "apply:after", "continue:before", "continue:after",
)  # fmt: skip
"""Of an agent, in the order in which it comes to them (sglang_rollout.agent.fault_points)."""
PARTS = ("agent", "engine", "router", "operator", "trainer")
CHOSEN = (
    ("agent", "stage:mid"),
    ("agent", "pause:after"),
    ("agent", "apply:begun"),
    ("agent", "apply:written"),
    ("agent", "apply:labelled"),
    ("engine", "stage:mid"),
    ("engine", "pause:after"),
    ("engine", "apply:written"),
    ("router", "stage:mid"),
    ("router", "apply:begun"),
    ("operator", "stage:end"),
    ("operator", "apply:begun"),
    ("trainer", "stage:mid"),
    ("trainer", "stage:end"),
)
BUCKET_BYTES = 1 << 16


@dataclass(frozen=True)
class Cell:
    """part: what is killed; step: where the agent of the engine that is hurt stands then."""

    part: str
    step: str

    def __str__(self) -> str:
        return f"{self.part}-{self.step}"

    @property
    def lands(self) -> bool:
        """Whether the fleet comes to the new version: a trainer that dies before all is staged takes it along."""
        return self.part != "trainer" or STEPS.index(self.step) >= STEPS.index("stage:end")


CELLS = [
    pytest.param(Cell(part, step), marks=[] if (part, step) in CHOSEN else pytest.mark.chaos)
    for part in PARTS
    for step in STEPS
]


@dataclass(frozen=True)
class Scene:
    """What a cell is played with."""

    fleet: Fleet
    trainer: Trainer
    chart: Chart
    cluster: Cluster

    async def play(self, cell: Cell, label: str, model: str, hurt: int) -> Job:
        """Begin to publish, and kill what the cell says when the agent of engine `hurt` is at the cell's step."""
        fault = FaultFile(self.cluster, self.fleet.namespace, self.fleet.name, hurt)
        if cell.part == "agent":
            await fault.arm(cell.step, "exit")
            return await self.trainer.begin(label, model, bucket_bytes=BUCKET_BYTES)
        if not cell.lands:
            sent = STEPS.index(cell.step) * 5
            job = await self.trainer.begin(label, model, bucket_bytes=BUCKET_BYTES, hold_after=sent)
            await job.holding()
            await job.kill()
            return job
        async with fault.holding(cell.step):
            job = await self.trainer.begin(label, model, bucket_bytes=BUCKET_BYTES)
            await fault.held()
            await self.kill(cell.part, hurt, job)
        return job

    async def kill(self, part: str, index: int, job: Job) -> None:
        match part:
            case "engine":
                await asyncio.to_thread(kill_engine, self.cluster, await self.fleet.pod(index))
            case "router":
                for pod in await self.fleet.router_pods():
                    await asyncio.to_thread(kill_container, self.cluster, pod, "router")
            case "operator":
                leader = await asyncio.to_thread(self.chart.leader)
                pod = await self.fleet.connection.get(core_path(self.chart.namespace, "pods", leader))
                await asyncio.to_thread(kill_container, self.cluster, pod, "operator")
            case "trainer":
                await job.kill()


@pytest.fixture
def scene(fleet: Fleet, trainer: Trainer, chart: Chart, cluster: Cluster) -> Scene:
    return Scene(fleet, trainer, chart, cluster)


@pytest.mark.parametrize("cell", CELLS, ids=str)
async def test_what_is_killed_at_a_step_leaves_one_version(
    cell: Cell, scene: Scene, load: Load, journal: Journal, plugin: Plugin, checksums: dict[str, str]
) -> None:
    old = journal.current
    label, _ = journal.next()
    model = journal.models[label]
    hurt = len(journal.order) % 2
    async with load() as seen:
        begun = time.monotonic()
        job = await scene.play(cell, label, model, hurt)
        told = await job.ended(timeout=2 * TIMEOUT_SECONDS)
        print(f"{cell}: {told}")
        assert told.state == ("killed" if cell.part == "trainer" else "done"), told
        if not cell.lands:
            await seen.more(4, version=old)
            label, _ = journal.next()
            model = journal.models[label]
            again = await scene.trainer.publish(label, model)
            assert again.state == "done", again
        await seen.more(1, version=label, timeout=TIMEOUT_SECONDS)
        print(f"{cell}: version {label} answers {time.monotonic() - begun:.1f} s after its publish")
        await scene.fleet.until_serving(label, timeout=START_SECONDS)
        healed = time.monotonic()
        await seen.more(4, version=label)
    if cell.part == "agent":
        assert await FaultFile(scene.cluster, scene.fleet.namespace, scene.fleet.name, hurt).fired()
    if cell.part in ("agent", "operator", "trainer"):
        assert answers.failures(seen.answers) == []
    assert answers.failures(seen.since(healed)) == []
    assert await checksum(scene.fleet, plugin) == checksums[model]
