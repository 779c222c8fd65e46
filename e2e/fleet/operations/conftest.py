"""The one fleet of these tests. Each test gets it running, resident and Ready, whatever the one before left."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from e2e.cluster import Cluster
from e2e.deployment import examples
from e2e.deployment.connection import Connection
from e2e.deployment.fleet import Fleet
from e2e.deployment.plugin import Plugin
from e2e.deployment.router_client import Request, RouterClient
from e2e.deployment.site import Site
from e2e.fleet.conftest import PROMPT
from e2e.fleet.journal import Journal
from e2e.fleet.load import Load, steady_load
from e2e.fleet.namespaces import own_namespace
from e2e.fleet.operations.trainer_pod import ACCOUNT, LABELS

NAME = "ops"
START_SECONDS = 300
RUNNING = 2
"""Requests that one engine of the fleet runs at once; more are queued."""
WATCHDOG_SECONDS = 30
"""Of SGLang's scheduler: the default of 300 would make a test of it long."""
TOKENS_A_CHUNK = 10
"""Of a stream. Each chunk repeats all tokens before it: one for every token keeps the reader busier than the engine."""


@pytest.fixture(scope="package")
def namespace(cluster: Cluster) -> Iterator[str]:
    with own_namespace(cluster, "e2e-operations"):
        yield "e2e-operations"


@pytest.fixture(scope="package")
def journal() -> Journal:
    return Journal()


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def started(connection: Connection, namespace: str, where: Site) -> AsyncIterator[Fleet]:
    """Two engines, as in the quickstart, that a trainer may reach."""
    fleet = Fleet(connection, namespace, NAME)
    manifest = examples.load(examples.QUICKSTART, name=NAME)
    ours = {
        "--max-running-requests": RUNNING,
        "--watchdog-timeout": WATCHDOG_SECONDS,
        "--stream-interval": TOKENS_A_CHUNK,
    }
    args = [arg for arg in manifest["spec"]["engine"]["args"] if arg.split("=")[0] not in ours]
    manifest["spec"]["engine"]["args"] = args + [f"{flag}={value}" for flag, value in ours.items()]
    manifest["spec"]["network"] = {
        "trainers": [{"podSelector": {"matchLabels": LABELS}}],
        "trainerAccounts": [{"name": ACCOUNT}],
    }
    await fleet.create(manifest)
    await fleet.until_ready(timeout=START_SECONDS)
    yield fleet
    await fleet.delete()
    await fleet.until_gone(timeout=180)


@pytest_asyncio.fixture(loop_scope="session")
async def fleet(started: Fleet, journal: Journal) -> Fleet:
    """The fleet, running with everything resident at the newest version."""
    spec = (await started.object())["spec"]
    if spec.get("control") == "External":
        await started.patch(control="Operator")
    resident = dict.fromkeys(("weights", "kvCache", "cudaGraph"), "Resident")
    running = {"state": "Running", "pauseMode": "Retract"}
    weights = {"updateStrategy": {"maxUnavailable": 1}}
    await started.patch(execution=running, memory=resident, weights=weights)
    if spec.get("weights", {}).get("version") != journal.current:
        await started.move_weights(journal.current, journal.current_path)
    await started.until_serving(journal.current, timeout=START_SECONDS)
    return started


@pytest.fixture
def plugin(cluster: Cluster, namespace: str) -> Plugin:
    return Plugin(cluster, namespace)


@pytest.fixture
def router(connection: Connection, started: Fleet) -> RouterClient:
    return RouterClient.of_fleet(connection, started.namespace, started.name)


@pytest.fixture
def load(router: RouterClient, journal: Journal, logprobs: dict[str, tuple[float, ...]]) -> Load:
    """Short requests."""
    requests = (Request(PROMPT, tokens=1, fingerprint=True), Request(tokens=16))
    return steady_load(router, journal, logprobs, requests)
