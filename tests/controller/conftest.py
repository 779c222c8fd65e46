"""One API server with the CRD for all tests of this folder that need it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster.apiserver import ApiServer

CRDS = Path(__file__).parents[2] / "crds"


@pytest.fixture(scope="session")
def server() -> Iterator[ApiServer]:
    """With namespaces ns (fleets) and ops (the operator and its ServiceAccount)."""
    with ApiServer() as running:
        running.kubectl("apply", "--server-side", "-f", str(CRDS))
        running.kubectl("wait", "--for=condition=Established", "crd", "--all")
        for namespace in ("ns", "ops"):
            running.kubectl("create", "namespace", namespace)
        running.kubectl("create", "serviceaccount", "operator", "-n", "ops")
        yield running
