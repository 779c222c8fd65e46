"""One API server, without nodes, on which the chart is installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.cluster.apiserver import ApiServer


@pytest.fixture(scope="session")
def server() -> Iterator[ApiServer]:
    with ApiServer() as started:
        yield started
