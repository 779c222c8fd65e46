"""One API server with the CRD for all tests of this folder that need it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from e2e.cluster.apiserver import ApiServer
from tests.api.resource_api import ResourceApi


@pytest.fixture(scope="session")
def resources() -> Iterator[ResourceApi]:
    """SGLangRollouts of a real API server."""
    with (
        ApiServer() as server,
        httpx.Client(base_url=server.url, verify=server.ssl_context(), timeout=30) as http,
    ):
        api = ResourceApi(http)
        api.install_crd()
        yield api
