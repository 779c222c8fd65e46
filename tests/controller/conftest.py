"""One API server with the CRD for all tests of this folder that need it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster.apiserver import ApiServer

CRDS = Path(__file__).parents[2] / "crds"


def await_crds(server: ApiServer, seconds: float = 30.0) -> None:
    """kubectl wait cannot: it, and jsonpath, fail on a CRD whose status has no conditions yet."""
    established = "jsonpath={.items[*].status.conditions[?(@.type=='Established')].status}"
    deadline = time.monotonic() + seconds
    while "True" not in server.kubectl("get", "crd", "-o", established, check=False):
        assert time.monotonic() < deadline, "the CRD was not established"
        time.sleep(0.1)


@pytest.fixture(scope="session")
def server() -> Iterator[ApiServer]:
    """With namespaces ns (fleets) and ops (the operator and its ServiceAccount)."""
    with ApiServer() as running:
        running.kubectl("apply", "--server-side", "-f", str(CRDS))
        await_crds(running)
        for namespace in ("ns", "ops"):
            running.kubectl("create", "namespace", namespace)
        running.kubectl("create", "serviceaccount", "operator", "-n", "ops")
        yield running
