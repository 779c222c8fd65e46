"""The routers' environments, made once a session when they are not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.router import environment


@pytest.fixture(scope="session")
def smg() -> Path:
    environment.ensure_front()
    return environment.smg_python()


@pytest.fixture(scope="session")
def old_router() -> Path:
    return environment.old_router_python()
