"""The one fleet of these tests and its trainer. Each test gets it Ready at the newest version that was published."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from e2e.cluster import Cluster
from e2e.deployment import answers, examples
from e2e.deployment.connection import Connection
from e2e.deployment.fleet import Fleet
from e2e.deployment.plugin import Plugin
from e2e.deployment.router_client import Request, RouterClient
from e2e.deployment.site import ENGINE_IMAGE, Site
from e2e.deployment.traffic import Traffic, traffic
from e2e.fleet.conftest import PROMPT
from e2e.fleet.journal import FIRST, SECOND, Journal, path_of
from e2e.fleet.namespaces import own_namespace
from e2e.fleet.weights import trainer as trainer_pod
from e2e.fleet.weights.checksums import checksum
from e2e.fleet.weights.fault_file import FAULTS
from e2e.fleet.weights.trainer import Trainer, create_trainer
from sglang_rollout.agent.fault_points import ENV_FAULTS

NAME = "sync"
MODELS = (FIRST, SECOND, "qwen3-v3")
START_SECONDS = 300
TIMEOUT_SECONDS = 120
"""Of a move: nothing may hang longer."""


def manifest(name: str, **spec: Any) -> dict[str, Any]:
    """The quickstart with a trainer let in, room for two versions, and agents that can be hurt."""
    found = examples.load(examples.QUICKSTART, name=name, **spec)
    for container in found["spec"]["engine"]["template"]["spec"]["initContainers"]:
        container["env"] = [{"name": ENV_FAULTS, "value": f"@{FAULTS}"}]
    wanted = {
        "network": {"trainers": [{"podSelector": {"matchLabels": trainer_pod.LABELS}}]},
        "agent": {"staging": {"versions": 2}},
        "weights": {"timeoutSeconds": TIMEOUT_SECONDS},
    }
    found["spec"] = examples.merged(found["spec"], wanted)
    return found


@pytest.fixture(scope="package")
def namespace(cluster: Cluster) -> Iterator[str]:
    with own_namespace(cluster, "e2e-weights"):
        yield "e2e-weights"


class ThreeModels(Journal):
    """One more than the stage has room for: what is published is never there already."""

    def next(self) -> tuple[str, str]:
        label = str(len(self.models) + 1)
        model = MODELS[len(self.models) % len(MODELS)]
        self.models[label] = model
        return label, path_of(model)


@pytest.fixture(scope="package")
def journal() -> Journal:
    return ThreeModels()


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def started(connection: Connection, namespace: str) -> AsyncIterator[Fleet]:
    """Two engines at the first checkpoint, as soon as they are Ready."""
    fleet = Fleet(connection, namespace, NAME)
    await fleet.create(manifest(NAME))
    await fleet.until_ready(timeout=START_SECONDS)
    yield fleet
    await fleet.delete()
    await fleet.until_gone(timeout=180)


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def checksums(connection: Connection, cluster: Cluster, namespace: str, started: Fleet) -> dict[str, str]:
    """Of an engine that was started from the checkpoint, by the checkpoint's name."""
    plugin = Plugin(cluster, namespace)
    found = {FIRST: await checksum(started, plugin)}
    others = {model: Fleet(connection, namespace, model) for model in MODELS[1:]}
    for model, fleet in others.items():
        await fleet.create(manifest(model, replicas=1, model={"path": path_of(model)}))
    for model, fleet in others.items():
        await fleet.until_ready(timeout=START_SECONDS)
        found[model] = await checksum(fleet, plugin)
        await fleet.delete()
    assert len(set(found.values())) == len(MODELS)
    return found


@pytest_asyncio.fixture(loop_scope="session")
async def fleet(started: Fleet, checksums: dict[str, str], journal: Journal) -> Fleet:
    """The fleet, Ready; what it serves is the newest in the journal."""
    weights = (await started.until_ready(timeout=START_SECONDS)).status.weights
    assert weights is not None
    # A label that a failed test asked for in vain is no newer one.
    journal.models[weights.version] = journal.models.pop(weights.version)
    return started


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def trainer(connection: Connection, cluster: Cluster, namespace: str, where: Site) -> Trainer:
    return await create_trainer(cluster, connection, namespace, NAME, ENGINE_IMAGE, where.images["operator"])


@pytest.fixture
def plugin(cluster: Cluster, namespace: str) -> Plugin:
    return Plugin(cluster, namespace)


@pytest.fixture
def router(connection: Connection, namespace: str) -> RouterClient:
    return RouterClient.of_fleet(connection, namespace, NAME)


Load = Callable[[], AbstractAsyncContextManager[Traffic]]


@pytest.fixture
def load(router: RouterClient, journal: Journal, logprobs: dict[str, tuple[float, ...]]) -> Load:
    """Short and long requests all the time. At its end: never did two versions serve at once, no label was never asked
    for, none differs from the weights that answered, and no answer went back to an older version."""
    requests = (Request(PROMPT, tokens=1, fingerprint=True),) * 2 + (Request(tokens=60),) * 2

    @asynccontextmanager
    async def running() -> AsyncIterator[Traffic]:
        async with traffic(router, requests) as seen:
            await seen.more(4)
            yield seen
        assert answers.side_by_side(seen.answers, journal.order) == []
        assert answers.other_than(seen.answers, journal.order) == []
        assert answers.torn(seen.answers, journal.order) == []
        fingerprints = {label: logprobs[model] for label, model in journal.models.items()}
        assert answers.mislabelled(seen.answers, fingerprints) == []

    return running
