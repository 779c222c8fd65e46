"""Ctrl-C and cancelled tasks: spec.weights is put back where the fleet has not decided, and what is left is told."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from sglang_rollout.client import PublishFailed
from sglang_rollout.kube_access.failures import Unreachable

from .conftest import WEIGHTS, Scene


def begun(fleet: dict[str, Any]) -> bool:
    weights = fleet["status"]["weights"]
    return bool((weights.get("transaction") or weights.get("prepared") or {}).get("version"))


def interrupt_when(scene: Scene, holds: Callable[[dict[str, Any]], bool], then: Callable[[], None]) -> threading.Thread:
    """Ctrl-C, once this holds for the fleet."""

    def run() -> None:
        scene.api.until(holds)
        then()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.fixture(autouse=True)
def _ctrl_c_is_heard() -> Iterator[None]:
    """What a shell starts with `&` ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def nothing() -> None:
    """Is done before Ctrl-C."""


@pytest.fixture
def live(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What becomes of the job that serves engines, without torch."""
    ends: list[str] = []
    words = types.ModuleType("live")

    def live_job(*_: Any, **__: Any) -> Coroutine[Any, Any, None]:
        async def serve() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ends.append(str((scene.api.rollout("fleet")["spec"].get("weights") or {}).get("version")))

        return serve()

    words.live_job = live_job  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang_rollout.client.live", words)
    scene.operator.undecided = True
    return ends


def asked(scene: Scene) -> dict[str, Any]:
    return dict(scene.api.rollout("fleet")["spec"].get("weights") or {})


def test_a_live_publish_is_taken_back_before_its_sender_ends(scene: Scene, live: list[str]) -> None:
    thread = interrupt_when(scene, begun, nothing)
    with pytest.raises(KeyboardInterrupt):
        scene.fleet.publish("v2", WEIGHTS, transfer="Direct", timeout=20)
    thread.join()
    assert asked(scene) == {}
    assert live == ["None"]


def test_what_is_decided_goes_on_and_is_told(scene: Scene, live: list[str]) -> None:
    def decide() -> None:
        scene.api.status(transaction={"decision": "Commit"})

    thread = interrupt_when(scene, begun, decide)
    with pytest.raises(KeyboardInterrupt) as caught:
        scene.fleet.publish("v2", WEIGHTS, transfer="Direct", timeout=20)
    thread.join()
    assert asked(scene)["version"] == "v2"
    (note,) = caught.value.__notes__
    assert note.startswith("fleet fleet has decided to commit version v2 and goes on with it; engines")


def test_an_api_server_that_is_away_leaves_it_and_that_is_told(scene: Scene, live: list[str]) -> None:
    def away() -> None:
        raise Unreachable("no answer from the API server")

    thread = interrupt_when(scene, begun, lambda: setattr(scene.api, "before_patch", away))
    with pytest.raises(KeyboardInterrupt) as caught:
        scene.fleet.publish("v2", WEIGHTS, transfer="Direct", timeout=20)
    thread.join()
    (note,) = caught.value.__notes__
    assert note.startswith("spec.weights of fleet fleet may still ask for version v2, put it back: no answer")


def test_the_same_is_told_with_a_failure(scene: Scene) -> None:
    def away() -> None:
        if scene.api.patches:
            raise Unreachable("no answer from the API server")

    scene.api.before_patch = away
    with pytest.raises(PublishFailed, match="may still ask for version v2") as caught:
        scene.fleet.publish("v2", {**WEIGHTS, "b": b"short"}, timeout=10)
    assert caught.value.left


@pytest.mark.parametrize("call", ["publish", "prepare"])
def test_a_staged_one_is_taken_back_while_it_waits_for_the_decision(scene: Scene, call: str) -> None:
    def held(fleet: dict[str, Any]) -> bool:
        return begun(fleet) and all(stage.slots[0].sealed for stage in scene.operator.stages.values())

    scene.operator.undecided = True
    thread = interrupt_when(scene, held, nothing)
    with pytest.raises(KeyboardInterrupt):
        getattr(scene.fleet, call)("v2", WEIGHTS, timeout=20)
    thread.join()
    assert asked(scene) == {}


def test_in_the_midst_of_the_iterator(scene: Scene) -> None:
    """The sender's thread lives on."""

    def gather() -> Iterator[tuple[str, bytes]]:
        yield "a", WEIGHTS["a"]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scene.fleet.publish("v2", gather(), timeout=10)
    assert asked(scene) == {}
    assert scene.fleet.publish("v2", WEIGHTS, timeout=10).version == "v2"


@pytest.mark.parametrize("transfer", ["Staged", "Direct"])
async def test_a_cancelled_task_takes_it_back(scene: Scene, live: list[str], transfer: Any) -> None:
    task = asyncio.create_task(scene.fleet.apublish("v2", WEIGHTS, transfer=transfer, timeout=20))
    await asyncio.to_thread(scene.api.until, begun)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asked(scene) == {}


async def test_a_cancelled_prepare_and_commit(scene: Scene) -> None:
    scene.operator.silent = True
    task = asyncio.create_task(scene.fleet.aprepare("v2", WEIGHTS, timeout=20))
    await asyncio.to_thread(scene.api.until, lambda fleet: fleet["spec"].get("weights"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asked(scene) == {}
    scene.operator.silent = False
    await scene.fleet.aprepare("v2", WEIGHTS, timeout=20)
    before = asked(scene)
    scene.operator.undecided = True
    task_ = asyncio.create_task(scene.fleet.acommit("v2", timeout=20))
    await asyncio.to_thread(scene.api.until, lambda fleet: fleet["spec"]["weights"].get("version"))
    task_.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task_
    assert asked(scene) == before, "it stays prepared"
    scene.operator.undecided = False
    assert (await scene.fleet.acommit("v2", timeout=20)).version == "v2"


def test_one_call_after_the_other(scene: Scene) -> None:
    scene.operator.undecided = True
    first = threading.Thread(target=lambda: scene.fleet.publish("v2", WEIGHTS, timeout=20))
    first.start()
    scene.api.until(begun)
    with pytest.raises(Exception, match="is sending to fleet fleet already"):
        scene.fleet.prepare("v3", WEIGHTS, timeout=5)
    scene.operator.undecided = False
    first.join(20)
    assert scene.fleet.version() == "v2"
