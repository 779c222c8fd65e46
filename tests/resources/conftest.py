"""One API server, without nodes, for all tests of this folder that need it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from e2e.cluster.apiserver import ApiServer


@pytest.fixture(scope="session")
def kubernetes() -> Iterator[httpx.Client]:
    """Talks to a real API server as its admin."""
    with (
        ApiServer() as server,
        httpx.Client(base_url=server.url, verify=server.ssl_context(), timeout=30) as http,
    ):
        yield http
