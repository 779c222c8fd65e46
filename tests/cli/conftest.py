"""One API server with the CRD for the tests of the plug-in that need a real one."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from e2e.cluster.apiserver import ApiServer
from tests.api.resource_api import ResourceApi

NAMESPACE = "rl"


@pytest.fixture(scope="session")
def server() -> Iterator[ApiServer]:
    with ApiServer() as running:
        with httpx.Client(base_url=running.url, verify=running.ssl_context(), timeout=30) as http:
            ResourceApi(http).install_crd()
        running.kubectl("create", "namespace", NAMESPACE)
        yield running
