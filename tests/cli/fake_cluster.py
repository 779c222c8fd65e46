"""The plug-in over an API server in memory, and what an operator would have written there."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from click.testing import CliRunner, Result

from sglang_rollout.cli.invocation import FIELD_MANAGER, Surroundings
from sglang_rollout.cli.verbs import sgrollout
from sglang_rollout.kube_access.cluster import Cluster
from tests.api.objects import Object
from tests.kube_access.fake_connection import CREATED, FakeConnection

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def condition(kind: str, status: bool, reason: str = "Because", message: str = "", generation: int = 1) -> Object:
    return {
        "type": kind,
        "status": "True" if status else "False",
        "observedGeneration": generation,
        "lastTransitionTime": CREATED,
        "reason": reason,
        "message": message,
    }


def engine(index: int, **fields: Any) -> Object:
    return {"name": f"fleet-e{index}", "ready": True, "routable": True, **fields}


def call(connection: FakeConnection, *words: str) -> Result:
    """The plug-in, in this process, over a fake."""
    surroundings = Surroundings(connect=lambda *_: Cluster(connection, FIELD_MANAGER, lambda _: None), now=lambda: NOW)
    return CliRunner().invoke(sgrollout, list(words), obj=surroundings)
