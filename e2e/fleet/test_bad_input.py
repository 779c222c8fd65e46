"""Resources that the API server accepts and the cluster cannot run: each says within seconds what is wrong where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from e2e.deployment import examples
from e2e.deployment.connection import Connection
from e2e.deployment.fleet import Fleet
from e2e.deployment.site import ENGINE_IMAGE
from sglang_rollout.api import ConditionType

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(240)]


@dataclass(frozen=True)
class Case:
    """words: in the condition's message, after the names of pod and container. within: seconds."""

    name: str
    spec: dict[str, Any]
    words: tuple[str, ...]
    pod: str = "e0-0"
    container: str = "engine"
    within: float = 30


NO_IMAGE = "registry.invalid/no-such-image:1"
CASES = (
    Case(
        "image-missing",
        {"engine": {"image": NO_IMAGE}},
        ("image", NO_IMAGE),
        container="agent",
    ),
    Case(
        "no-room",
        {"engine": {"resources": {"requests": {"cpu": "1000"}}}},
        ("cannot be scheduled", "Insufficient cpu"),
        container="",
    ),
    Case("model-missing", {"model": {"path": "/models/no-such-model"}}, ("/models/no-such-model",)),
    Case("model-half-written", {"model": {"path": "/models/qwen3-half-written"}}, ("model.safetensors",)),
    # The words are SGLang's own; it imports all of itself before it reads its flags.
    Case(
        "flag-unknown",
        {"engine": {"args": ["--no-such-flag=1"]}},
        ("unrecognized arguments", "--no-such-flag"),
        within=90,
    ),
    Case(
        "router-image-missing",
        {"router": {"image": NO_IMAGE}, "engine": {"resources": {"requests": {"cpu": "1000"}}}},
        ("image", NO_IMAGE),
        pod="router",
        container="sidecar",
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_what_cannot_run_says_why(case: Case, connection: Connection, namespace: str) -> None:
    fleet = Fleet(connection, namespace, case.name)
    manifest = examples.load(examples.QUICKSTART, name=case.name, replicas=1, **case.spec)
    await fleet.create(manifest)
    named = (f"{case.name}-{case.pod}", *([f"container {case.container}"] if case.container else []))
    found = await fleet.until_condition(ConditionType.DEGRADED, True, *named, *case.words, timeout=case.within)
    print(found.message)
    await fleet.until_condition(ConditionType.READY, False, *named, timeout=10)
    await fleet.delete()
    await fleet.until_gone(timeout=90)


async def test_a_bad_spec_is_left_behind_by_a_good_one(connection: Connection, namespace: str) -> None:
    """Without anyone deleting pods: the group is stuck on an image that does not exist."""
    fleet = Fleet(connection, namespace, "mended")
    manifest = examples.load(examples.QUICKSTART, name="mended", replicas=1, engine={"image": NO_IMAGE})
    await fleet.create(manifest)
    await fleet.until_condition(ConditionType.DEGRADED, True, "mended-e0-0", timeout=30)
    await fleet.patch(engine={"image": ENGINE_IMAGE})
    await fleet.until_ready(timeout=200)
    await fleet.delete()
    await fleet.until_gone(timeout=90)
