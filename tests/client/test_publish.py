"""publish(), prepare() and commit() against a fleet in memory whose agents receive for real: what is asked, what comes
back, and what is told when it does not."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sglang_rollout.client import PublishFailed, PublishRefused, PublishTimedOut

from .conftest import WEIGHTS, Scene


def test_a_version_is_served(scene: Scene) -> None:
    result = scene.fleet.publish("v2", WEIGHTS, timeout=10)
    assert (result.version, result.size, result.transport, result.stall_seconds) == ("v2", 600, "Gloo", 0.25)
    assert [(one.name, one.version, one.current) for one in result.engines] == [("e0", "v2", True), ("e1", "v2", True)]
    assert [one.reason for one in result.agents] == ["", ""]
    assert 0 < result.staged_seconds <= result.committed_seconds < 5
    assert result.root == scene.operator.stages["p0"].slots[0].sealed.root  # type: ignore[union-attr]
    host, port = scene.fleet.sender_address.split(":")
    assert scene.api.patches == [
        {
            "weights": {
                "version": "v2",
                "source": {
                    "type": "Distributed", "disk": None, "colocated": None,
                    "distributed": {
                        "transfer": "Staged", "transport": "Auto", "senders": [{"address": host, "port": int(port)}]
                    },
                },
            }
        }
    ]  # fmt: skip
    assert scene.fleet.version() == "v2"


async def test_the_same_from_a_coroutine_and_a_generator(scene: Scene) -> None:
    result = await scene.fleet.apublish("v2", iter(WEIGHTS.items()), timeout=10)
    assert result.version == "v2"
    again = await asyncio.wait_for(scene.fleet.apublish("v3", lambda: WEIGHTS.items(), timeout=10), 20)
    assert again.root == result.root
    assert scene.transport.opened == [3]  # one group for both


def test_prepared_first_committed_later(scene: Scene) -> None:
    prepared = scene.fleet.prepare("v2", WEIGHTS, timeout=10)
    assert (prepared.version, prepared.size) == ("v2", 600)
    assert scene.fleet.version() == "v1"
    result = scene.fleet.commit("v2", timeout=10)
    assert result.version == "v2"
    assert (
        scene.api.patches[1]["weights"]["source"]["distributed"]
        == (scene.api.patches[0]["weights"]["prepare"]["source"]["distributed"])
    )


def test_only_what_is_prepared_is_committed(scene: Scene) -> None:
    with pytest.raises(PublishRefused, match="version v2 is not prepared, nothing is"):
        scene.fleet.commit("v2", timeout=5)


class Module:
    """As of torch: callable, and no tensors."""

    def __call__(self) -> None:
        raise AssertionError("nobody asked for a forward pass")

    def state_dict(self) -> dict[str, bytes]:
        return WEIGHTS


@pytest.mark.parametrize(
    ("version", "tensors", "options", "sentence"),
    [
        ("v1", WEIGHTS, {}, "knows version v1 already"),
        (" v2", WEIGHTS, {}, "no label of weights"),
        ("default", WEIGHTS, {}, "no label of weights"),
        ("v2", {}, {}, "no tensors"),
        ("v2", {"a": 3}, {}, "'a' is a int"),
        ("v2", WEIGHTS, {"bucket_bytes": 1}, "bucket_bytes 1 is too small"),
        (2, WEIGHTS, {}, "version 2 is an int: give a string, such as '2'"),
        ("v2", WEIGHTS, {"timeout": 0}, "timeout 0 is no time to wait for"),
        ("v2", WEIGHTS, {"timeout": float("nan")}, "timeout nan is no time to wait for"),
        ("v2", WEIGHTS, {"timeout": None}, "timeout None is a NoneType: give seconds"),
        ("v2", WEIGHTS, {"transfer": "staged"}, "'staged' is none of Staged, Direct, Colocated"),
        ("v2", WEIGHTS, {"transport": "nccl"}, "'nccl' is none of Auto, NCCL"),
        ("v2", Module(), {}, r"a Module is no tensors: give its state_dict\(\)"),
        ("v2", 7, {}, "an int is no tensors: give a mapping"),
        ("v2", "model.safetensors", {}, "a str is no tensors: give a mapping"),
        ("v2", WEIGHTS, {"rank": 2}, "rank 2 is none of the 1 senders"),
        ("v2", WEIGHTS, {"senders": ["nonsense"]}, "this rank listens at"),
        ("v2", iter(()), {"transfer": "Direct"}, "needs a mapping"),
    ],
)
def test_bad_input_changes_nothing(
    scene: Scene, version: str, tensors: Any, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(PublishRefused, match=sentence):
        scene.fleet.publish(version, tensors, **{"timeout": 5, **options})
    if "transfer" not in options:
        with pytest.raises(PublishRefused, match=sentence):
            scene.fleet.prepare(version, tensors, **{"timeout": 5, **options})
    assert scene.api.patches == []


@pytest.mark.parametrize(("version", "timeout"), [(2, 5.0), ("v2", 0.0), ("v2", None)])
def test_a_commit_by_bad_input_changes_nothing(scene: Scene, version: Any, timeout: Any) -> None:
    with pytest.raises(PublishRefused, match="give"):
        scene.fleet.commit(version, timeout=timeout)
    assert scene.api.patches == []


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ({"metadata": {"deletionTimestamp": "now"}}, "is being deleted"),
        ({"spec": {"control": "External"}}, "control External"),
        ({"status": {"engines": []}}, "has no engines"),
        (
            {
                "status": {
                    "weights": {"transaction": {"version": "v7", "id": "t", "source": {"senders": ["10.0.0.9:5000"]}}}
                }
            },
            "is moving to version v7 now, for the trainer at 10.0.0.9:5000",
        ),
        ({"spec": {"weights": {"version": "v8"}}}, "is moving to version v8 now"),
    ],
)
def test_a_fleet_that_cannot_take_it(scene: Scene, state: dict[str, Any], sentence: str) -> None:
    scene.operator.silent = True
    from .fake_fleet import merge

    merge(scene.api.fleet, state)
    with pytest.raises(PublishRefused, match=sentence):
        scene.fleet.publish("v2", WEIGHTS, timeout=5)
    assert scene.api.patches == []


def test_a_fleet_that_is_not_there(scene: Scene) -> None:
    with pytest.raises(PublishRefused, match="there is no fleet other in namespace train"):
        scene.client("other").publish("v2", WEIGHTS, timeout=5)


def test_of_two_trainers_one_is_told(scene: Scene) -> None:
    """The second one asks between the first one's look and its patch."""
    scene.operator.silent = True

    def other() -> None:
        scene.api.before_patch = lambda: None
        with scene.api.changed:
            scene.api.fleet["spec"]["weights"] = {"version": "theirs"}
            scene.api._touch()

    scene.api.before_patch = other
    with pytest.raises(PublishRefused, match="is moving to version theirs now"):
        scene.fleet.publish("v2", WEIGHTS, timeout=5)


def test_wrong_weights_name_the_tensor_and_what_serves(scene: Scene) -> None:
    before = dict(scene.api.fleet["spec"].get("weights") or {})
    with pytest.raises(PublishFailed) as caught:
        scene.fleet.publish("v2", {**WEIGHTS, "b": b"short"}, timeout=10)
    assert "b is [5] U8, the running model has [200] U8" in str(caught.value)
    assert "v1 serves on" in str(caught.value)
    assert caught.value.lasting
    assert not isinstance(caught.value, PublishTimedOut)
    assert (scene.api.fleet["spec"].get("weights") or {}) == before  # nobody is asked for it again
    assert scene.fleet.publish("v3", WEIGHTS, timeout=10).version == "v3"


def test_an_iterator_is_always_run_to_its_end(scene: Scene) -> None:
    """Other ranks may take part in it."""
    taken = []

    def gather() -> Iterator[tuple[str, bytes]]:
        for name, data in {"a": b"wrong", "b": WEIGHTS["b"], "c": WEIGHTS["c"], "d": b"d"}.items():
            taken.append(name)
            yield name, data

    with pytest.raises(PublishFailed):
        scene.fleet.publish("v2", gather(), timeout=10)
    assert taken == ["a", "b", "c", "d"]


def test_what_the_iterator_raises_is_raised_and_told(scene: Scene) -> None:
    def gather() -> Iterator[tuple[str, bytes]]:
        yield "a", WEIGHTS["a"]
        raise ZeroDivisionError("in the gather")

    with pytest.raises(ZeroDivisionError):
        scene.fleet.publish("v2", gather(), timeout=10)
    assert scene.fleet.publish("v3", WEIGHTS, timeout=10).version == "v3"


def test_an_agent_that_is_lost_is_told(scene: Scene) -> None:
    scene.operator.hurt["p1"] = {"slot": "c"}
    result = scene.fleet.publish("v2", WEIGHTS, timeout=20)
    assert {one.receiver: one.reason for one in result.agents} == {"p0": "", "p1": "the stage has no slot 'c'"}


def test_nobody_waits_for_an_operator_that_is_away(scene: Scene) -> None:
    scene.operator.silent = True
    begin = time.monotonic()
    with pytest.raises(PublishTimedOut, match="the operator has not begun: does it run"):
        scene.fleet.publish("v2", WEIGHTS, timeout=1.5)
    assert time.monotonic() - begin < 4


def test_several_ranks_send(scene: Scene) -> None:
    other = scene.client()
    senders = [scene.fleet.sender_address, other.sender_address]
    found: list[Any] = []
    second = threading.Thread(
        target=lambda: found.append(other.publish("v2", {"c": WEIGHTS["c"]}, rank=1, senders=senders, timeout=10))
    )
    second.start()
    first = scene.fleet.publish("v2", {"a": WEIGHTS["a"], "b": WEIGHTS["b"]}, rank=0, senders=senders, timeout=10)
    second.join(10)
    assert first.size + found[0].size == 600
    assert first.root == found[0].root
    assert len(scene.api.patches) == 1
