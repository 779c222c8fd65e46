"""Ranks after the first: they only look at the fleet, and hear of what rank 0 does there."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from sglang_rollout.client import FleetError, PublishFailed, PublishTimedOut
from sglang_rollout.client import asking as asking_module
from sglang_rollout.client.verdict import OthersAsking

from .conftest import WEIGHTS, Scene

SENDERS = ["10.0.0.1:1", "10.0.0.2:2"]


def fleet(version: str = "v1", ahead: str = "", senders: list[str] = SENDERS, **status: Any) -> dict[str, Any]:
    listed = [{"address": one.split(":")[0], "port": int(one.split(":")[1])} for one in senders]
    source = {"type": "Distributed", "distributed": {"senders": listed}}
    weights: dict[str, Any] = {"version": version, "source": source}
    weights |= {"prepare": {"version": ahead, "source": source}} if ahead else {}
    return {"metadata": {"name": "f"}, "spec": {"weights": weights}, "status": {"weights": status}}


COMMITTED = fleet("v3", history=[{"version": "v2"}])


@pytest.mark.parametrize(
    ("ahead", "seen", "told"),
    [
        (False, [fleet(), fleet("v2"), fleet()], True),
        (False, [fleet(), fleet()], False),
        (False, [fleet(), fleet("v2"), COMMITTED], False),
        # Of an earlier life of the trainer, or already ours: nobody can tell.
        (False, [fleet("v2"), fleet(), fleet("v2"), fleet()], False),
        (False, [fleet("v2", senders=SENDERS[:1]), fleet(), fleet("v2"), fleet()], True),
        (False, [fleet(), fleet("v2", senders=SENDERS[:1]), fleet()], False),
        (True, [fleet(), fleet(ahead="v2"), fleet()], True),
        (True, [fleet(), fleet(ahead="v2"), fleet("v2")], False),
        (True, [fleet(), fleet("v2"), fleet()], False),
    ],
)
def test_what_rank_0_has_taken_back_is_known_by_having_seen_it(
    ahead: bool, seen: list[dict[str, Any]], told: bool
) -> None:
    others = OthersAsking(seen[0], "v2", SENDERS, ahead)
    assert [bool(others.taken_back(one)) for one in seen[1:]] == [False] * (len(seen) - 2) + [told]


@pytest.fixture
def looking(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when a rank after the first has looked at the fleet for the first time."""
    looks = threading.Event()

    class Seen(OthersAsking):
        def __init__(self, *words: Any) -> None:
            super().__init__(*words)
            looks.set()

    monkeypatch.setattr(asking_module, "OthersAsking", Seen)
    return looks


@pytest.mark.parametrize("call", ["publish", "prepare"])
def test_they_hear_at_once_that_rank_0_gave_up(scene: Scene, looking: threading.Event, call: str) -> None:
    """Also when the operator has nothing to say."""
    scene.operator.silent = True
    other = scene.client()
    senders = [scene.fleet.sender_address, other.sender_address]
    caught: list[FleetError] = []

    def second() -> None:
        try:
            getattr(other, call)("v2", {"c": WEIGHTS["c"]}, rank=1, senders=senders, timeout=100)
        except FleetError as error:
            caught.append(error)

    thread = threading.Thread(target=second)
    thread.start()
    assert looking.wait(10)
    with pytest.raises(PublishTimedOut):
        getattr(scene.fleet, call)("v2", {"a": WEIGHTS["a"]}, senders=senders, timeout=0.5)
    thread.join(10)
    (error,) = caught
    assert isinstance(error, PublishFailed)
    assert not isinstance(error, PublishTimedOut)
    assert str(error).startswith("version v2: rank 0 does not ask for it any more: its own error says why")


def test_they_say_when_rank_0_never_asked(scene: Scene) -> None:
    other = scene.client()
    senders = [scene.fleet.sender_address, other.sender_address]
    with pytest.raises(PublishTimedOut, match="rank 0 has not asked the fleet for it"):
        other.publish("v2", {"c": WEIGHTS["c"]}, rank=1, senders=senders, timeout=0.3)
