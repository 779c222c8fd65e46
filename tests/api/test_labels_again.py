"""The steps in which a client takes back a label and asks for it again are changes that a real API server takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sglang_rollout.client.labels import standing, taken_back
from sglang_rollout.client.resource import as_it_was, distributed
from tests.api.objects import Object, rollout
from tests.api.resource_api import ResourceApi

pytestmark = pytest.mark.apiserver

SENDER = "10.0.0.7:29600"
DIRECT = {"type": "Distributed", "distributed": {"transfer": "Direct", "senders": [{"address": "10.0.0.9", "port": 1}]}}
DISK: Object = {"type": "Disk", "disk": {"path": "/models/v0"}}
MINE = distributed([SENDER], "Staged", "Auto")
COMMITTED = "2026-01-02T03:04:05Z"


def seen(resources: ResourceApi, name: str, **weights: Any) -> Object:
    """The resource, when the operator has answered it."""
    generation = resources.get(name).json()["metadata"]["generation"]
    engines = [{"name": f"{name}-0"}]
    status = {"observedGeneration": generation, "engines": engines, "weights": weights}
    response = resources.patch(name, {"status": status}, subresource="status")
    assert response.is_success, response.text
    found: Object = resources.get(name).json()
    return found


def patch(resources: ResourceApi, name: str, weights: Object) -> None:
    response = resources.patch(name, {"spec": {"weights": weights}})
    assert response.is_success, response.json()["message"]


@pytest.fixture
def name(request: pytest.FixtureRequest, resources: ResourceApi) -> Iterator[str]:
    """Of the resource of one case, which is gone after it."""
    yield f"again-{request.param}"
    resources.delete(f"again-{request.param}")


@pytest.mark.parametrize(
    ("name", "newest", "before", "prepare"),
    [
        ("boot", {"version": "default", "path": "/models/m"}, {}, None),
        ("folder", {"version": "v0", "path": "/models/v0"}, {"version": "v0", "source": DISK}, None),
        ("sent", {"version": "v0"}, {"version": "v0", "source": DIRECT}, None),
        ("staged", {"version": "v0"}, {"version": "v0", "source": MINE}, {"version": "v1", "source": MINE}),
        ("ahead", {"version": "default", "path": "/models/m"}, {}, {"version": "v1", "source": MINE}),
    ],
    indirect=["name"],
)
def test_a_label_is_taken_back_and_asked_for_again(
    resources: ResourceApi, name: str, newest: Object, before: Object, prepare: Object | None
) -> None:
    weights = {**before, **({"prepare": prepare} if prepare else {})}
    spec = {"model": {"path": "/models/m"}, **({"weights": without_nothing(weights)} if weights else {})}
    response = resources.create(rollout(name, **spec))
    assert response.is_success, response.json()["message"]
    if prepare is None:
        patch(resources, name, {"version": "v1", "source": {**DIRECT, "disk": None}})
    history = [{**newest, "committedAt": COMMITTED}]
    failed = {"id": "g2.1:v1", "version": "v1", "decision": "Abort", "completedAt": COMMITTED}
    told = {"version": newest["version"], "phase": "Failed", "history": history, "transaction": failed}
    fleet = seen(resources, name, **told)
    assert standing(fleet, "v1", [SENDER]).left
    patch(resources, name, taken_back(fleet, "v1", MINE))
    fleet = resources.get(name).json()
    assert standing(fleet, "v1", [SENDER]).unseen
    fleet = seen(resources, name, **told)
    assert standing(fleet, "v1", [SENDER]) == standing(fleet, "v2", [SENDER])
    kept = fleet["spec"]["weights"]
    patch(resources, name, {"version": "v1", "source": MINE})
    patch(resources, name, as_it_was(kept))
    assert resources.get(name).json()["spec"]["weights"] == kept


def without_nothing(value: Object) -> Object:
    """Without members that are None, which only a patch may have."""
    return {
        key: without_nothing(one) if isinstance(one, dict) else one for key, one in value.items() if one is not None
    }
