"""A label whose attempt came to nothing is used again, at once: nothing of the earlier attempt may be taken for the
later one, and a label that was committed keeps its bytes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from sglang_rollout.client import PublishFailed, PublishRefused, PublishTimedOut, RolloutFleet

from .conftest import WEIGHTS, Scene
from .fake_fleet import engine, merge

OTHER = {name: bytes(reversed(data[:-1] + b"!")) for name, data in WEIGHTS.items()}
WRONG = {**WEIGHTS, "b": b"short"}
ELSEWHERE = {"type": "Distributed", "distributed": {"transfer": "Direct", "senders": [{"address": "10.9", "port": 1}]}}


def ours(fleet: RolloutFleet) -> dict[str, Any]:
    host, port = fleet.sender_address.split(":")
    sent = {"transfer": "Staged", "transport": "Auto", "senders": [{"address": host, "port": int(port)}]}
    return {"type": "Distributed", "distributed": sent}


def failed(version: str, generation: int = 1, **more: Any) -> dict[str, Any]:
    told = {"decision": "Abort", "completedAt": "then", "message": "the network"}
    return {"id": f"g{generation}.1:{version}", "version": version, "generation": generation, **told, **more}


@pytest.fixture
def behind(scene: Scene) -> Callable[[Callable[[], Any]], Any]:
    """Runs a call while the operator sees nothing, and lets it see when the call is under way."""

    def run(call: Callable[[], Any]) -> Any:
        scene.operator.silent = True
        waker = threading.Timer(0.3, lambda: setattr(scene.operator, "silent", False))
        waker.start()
        try:
            return call()
        finally:
            waker.join()

    return run


@pytest.mark.parametrize("second", [WEIGHTS, OTHER], ids=["same", "other"])
def test_after_a_failure_the_same_label_may_be_published(scene: Scene, second: dict[str, bytes]) -> None:
    with pytest.raises(PublishFailed) as caught:
        scene.fleet.publish("v2", WRONG, timeout=10)
    assert caught.value.left == ""
    result = scene.fleet.publish("v2", second, timeout=10)
    assert (result.version, scene.fleet.version()) == ("v2", "v2")
    assert result.root == scene.operator.stages["p0"].slots[0].sealed.root  # type: ignore[union-attr]


async def test_not_before_the_operator_has_seen_that_it_was_taken_back(scene: Scene) -> None:
    """Its open move of the first attempt would go on with what agents have of that one."""
    scene.operator.undecided = True
    first = asyncio.create_task(scene.fleet.apublish("v2", WEIGHTS, timeout=10))
    begun = await asyncio.to_thread(scene.api.until, lambda f: f["status"]["weights"].get("transaction"))
    scene.operator.silent = True
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert len(scene.api.patches) == 2
    scene.operator.undecided = False
    second = asyncio.create_task(scene.fleet.apublish("v2", OTHER, timeout=10))
    await asyncio.sleep(0.3)
    assert len(scene.api.patches) == 2
    scene.operator.silent = False
    result = await second
    told = scene.api.rollout("fleet")["status"]["weights"]["transaction"]
    assert told["root"] == result.root
    assert told["id"] != begun["status"]["weights"]["transaction"]["id"]


def test_what_a_trainer_that_died_has_left_is_taken_back_first(scene: Scene) -> None:
    """Not in one step: the API server lets no version change its source."""
    merge(scene.api.fleet, {"spec": {"weights": {"version": "v2", "source": ELSEWHERE}}})
    scene.api.status(phase="Failed", transaction=failed("v2"))
    assert scene.fleet.publish("v2", WEIGHTS, timeout=20).version == "v2"
    first, second = (patch["weights"] for patch in scene.api.patches)
    assert (first["version"], second["version"]) == ("v1", "v2")
    assert first["source"]["distributed"] == second["source"]["distributed"]


@pytest.mark.parametrize(
    ("newest", "told"),
    [
        ({"version": "default", "path": "/m"}, {"version": None, "source": None}),
        ({"version": "v1", "path": "/m"}, {"version": "v1", "source": None}),
        (
            {"version": "v1", "path": "/other"},
            {
                "version": "v1",
                "source": {"type": "Disk", "disk": {"path": "/other"}, "distributed": None, "colocated": None},
            },
        ),
    ],
)
def test_the_fleet_stays_at_what_it_serves_meanwhile(scene: Scene, newest: Any, told: Any, behind: Any) -> None:
    """By its folder too: engines start from there."""
    scene.operator.silent = True
    merge(scene.api.fleet, {"spec": {"model": {"path": "/m"}, "weights": {"version": "v2", "source": ELSEWHERE}}})
    scene.api.status(phase="Failed", transaction=failed("v2"), history=[newest])
    with pytest.raises(PublishTimedOut):
        scene.fleet.publish("v2", WEIGHTS, timeout=0.5)
    assert [patch["weights"] for patch in scene.api.patches] == [told]


def test_what_this_trainer_sent_in_an_earlier_life_does_not_go_on(scene: Scene, behind: Any) -> None:
    """It died and listens again at the same address, while its move is open."""
    scene.operator.silent = True
    merge(scene.api.fleet, {"spec": {"weights": {"version": "v2", "source": ours(scene.fleet)}}})
    source = {"senders": [scene.fleet.sender_address]}
    begun = failed("v2", decision=None, completedAt=None, source=source)
    scene.api.status(phase="Staging", transaction=begun)
    result = behind(lambda: scene.fleet.publish("v2", OTHER, timeout=10))
    assert scene.api.rollout("fleet")["status"]["weights"]["transaction"]["root"] == result.root
    assert [patch["weights"]["version"] for patch in scene.api.patches] == ["v1", "v2"]


@pytest.mark.parametrize(
    "state",
    [
        {"weights": {"transaction": failed("v2", decision="Commit", completedAt=None)}},
        {"weights": {"history": [{"version": "v2"}, {"version": "v1"}]}},
        {"engines": [engine("e0", "v2"), engine("e1")]},
    ],
    ids=["decided", "served", "in an engine"],
)
def test_a_label_that_means_bytes_already_is_refused(scene: Scene, state: dict[str, Any]) -> None:
    scene.operator.silent = True
    merge(scene.api.fleet["status"], state)
    with pytest.raises(PublishRefused, match="knows version v2 already"):
        scene.fleet.publish("v2", WEIGHTS, timeout=5)
    assert scene.api.patches == []


def test_a_label_that_means_other_bytes_in_the_end_is_no_success(scene: Scene) -> None:
    scene.operator.root = "f" * 64
    with pytest.raises(PublishFailed, match="the fleet has other bytes by this label") as caught:
        scene.fleet.publish("v2", WEIGHTS, timeout=10)
    assert "put it back" not in str(caught.value)


def test_another_rank_takes_no_earlier_failure_for_its_own(scene: Scene) -> None:
    scene.api.status(phase="Failed", transaction=failed("v2"))
    other = scene.client()
    senders = [scene.fleet.sender_address, other.sender_address]
    found: list[Any] = []

    def second() -> None:
        found.append(other.publish("v2", {"c": WEIGHTS["c"]}, rank=1, senders=senders, timeout=10))

    thread = threading.Thread(target=second)
    thread.start()
    first = scene.fleet.publish("v2", {"a": WEIGHTS["a"], "b": WEIGHTS["b"]}, senders=senders, timeout=10)
    thread.join(10)
    assert [one.root for one in found] == [first.root]


@pytest.mark.parametrize("second", [WEIGHTS, OTHER], ids=["same", "other"])
def test_what_failed_may_be_prepared_again(scene: Scene, behind: Any, second: dict[str, bytes]) -> None:
    """Also before the operator has seen that it was taken back: what it says of the first is no answer."""
    with pytest.raises(PublishFailed):
        scene.fleet.prepare("v2", WRONG, timeout=10)
    prepared = behind(lambda: scene.fleet.prepare("v2", second, timeout=10))
    assert scene.fleet.commit("v2", timeout=10).root == prepared.root


def test_what_was_prepared_may_be_prepared_and_published_anew(scene: Scene) -> None:
    first = scene.fleet.prepare("v2", WEIGHTS, timeout=10)
    second = scene.fleet.prepare("v2", OTHER, timeout=10)
    assert first.root != second.root
    assert scene.fleet.publish("v2", WEIGHTS, timeout=10).root == first.root
    with pytest.raises(PublishRefused, match="knows version v2 already"):
        scene.fleet.prepare("v2", WEIGHTS, timeout=5)
