"""The site of all fleet tests: the cluster with the operator in it, made once; and what to look at when one fails."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from e2e.cluster import Cluster, ClusterError
from e2e.cluster.process import run
from e2e.deployment import diagnostics, site
from e2e.deployment.chart import NAMESPACE as OPERATOR_NAMESPACE
from e2e.deployment.chart import Chart
from e2e.deployment.connection import Connection, connect
from e2e.deployment.site import Site
from e2e.fleet import namespaces
from e2e.fleet.external_router import CREDENTIAL, create_credential
from e2e.sglang_cpu import environment, models

PROMPT = (40, 33, 51, 12, 77, 300, 45, 210, 99, 18, 140, 7)
"""Token ids below the models' vocabulary of 384."""
LOGPROBS = Path(__file__).parent / "write_logprobs.py"

_sites: list[Site] = []


@pytest.fixture(scope="session")
def where() -> Site:
    """The cluster is up, our images are in it, and the operator of this checkout runs with two replicas."""
    found = site.with_images(site.bring_up())
    _sites.append(found)
    create_credential(found.cluster, OPERATOR_NAMESPACE)
    Chart(found.cluster).install(found.images, routerCredentials=[CREDENTIAL])
    return found


@pytest.fixture(scope="session")
def cluster(where: Site) -> Cluster:
    return where.cluster


@pytest.fixture(scope="session")
def chart(cluster: Cluster) -> Chart:
    return Chart(cluster)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def connection(cluster: Cluster) -> AsyncIterator[Connection]:
    async with connect(cluster) as found:
        yield found


@pytest.fixture(scope="module")
def namespace(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of this module's own, named after it."""
    name = "e2e-" + request.module.__name__.rpartition(".")[2].removeprefix("test_").replace("_", "-")
    with namespaces.own_namespace(cluster, name):
        yield name


@pytest.fixture(scope="session")
def logprobs(where: Site) -> dict[str, tuple[float, ...]]:
    """The log probabilities of PROMPT by model name, computed by transformers."""
    wanted = [name for name, model in models.MODELS.items() if name.startswith("qwen3-v")]
    folders = {str(models.path(name)): name for name in wanted}
    argv = [str(environment.interpreter()), str(LOGPROBS), json.dumps(PROMPT), *folders]
    printed = json.loads(run(argv, timeout=300, env={"OMP_NUM_THREADS": "1"}).stdout)
    return {folders[folder]: tuple(values) for folder, values in printed.items()}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
    report = yield
    if report.failed and _sites:  # type: ignore[attr-defined]
        with contextlib.suppress(ClusterError, OSError):
            account, _ = diagnostics.collect(
                _sites[0].cluster, (*sorted(namespaces.present), OPERATOR_NAMESPACE), item.name
            )
            report.sections.append(("cluster", account))  # type: ignore[attr-defined]
    return report
