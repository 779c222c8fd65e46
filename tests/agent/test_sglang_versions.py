"""Which release is driven how, and what differs between them on a move."""

from __future__ import annotations

import asyncio
from importlib import metadata

import pytest

from sglang_rollout.agent.sglang_versions import NEWEST, OLDEST, RELEASES, Release, UnsupportedRelease, release_of
from sglang_rollout.protocol.report import EngineState
from sglang_rollout.protocol.weights import KVCache, PauseMode, Step, WeightMove

from .conftest import Versions
from .fake_pod import FakePod, MakePod, eventually


@pytest.mark.parametrize(
    ("version", "row"),
    [
        ("0.5.17", OLDEST),
        ("0.5.17.post2", OLDEST),
        ("0.5.22", OLDEST),
        ("0.5.23", NEWEST),
        ("0.5.23+cu130", NEWEST),
        ("0.6.0rc1", NEWEST),
        ("1.0.0", NEWEST),
        ("0.0.0.dev1+g1234", NEWEST),
        ("", NEWEST),
    ],
)
def test_a_release_is_driven_as_the_last_known_before_it(version: str, row: Release) -> None:
    assert release_of(version) is row


def test_the_rows_are_in_order() -> None:
    assert list(RELEASES) == sorted(RELEASES, key=lambda row: row.since)


@pytest.mark.parametrize("version", ["0.5.16", "0.4.9.post1"])
def test_one_that_is_too_old_is_refused(version: str) -> None:
    with pytest.raises(UnsupportedRelease, match=r"older than 0\.5\.17, .*use a newer engine\.image"):
        release_of(version)


async def test_an_old_engine_is_not_driven(make_pod: MakePod) -> None:
    pod = await make_pod()
    await pod.put(pod.desired())
    engine = await pod.launch()
    engine.version = "0.5.9"
    report = await pod.until(lambda r: r.engine.failure != "")
    assert report.engine.state is EngineState.STARTING
    assert "SGLang 0.5.9 is older than 0.5.17" in report.engine.failure
    await pod.put(pod.desired(move=WeightMove("m", pod.boot, Step.CONTINUE)))
    await asyncio.sleep(0.1)
    assert engine.rules.calls == []


async def test_an_old_package_is_refused_before_it_loads(make_pod: MakePod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.5.9")
    pod = await make_pod()
    asked = asyncio.create_task(pod.ask_to_start("s1"))
    report = await pod.until(lambda r: r.engine.state is EngineState.WAITING and r.engine.failure != "")
    assert "SGLang 0.5.9 is older than 0.5.17" in report.engine.failure
    monkeypatch.setattr(metadata, "version", lambda name: "0.5.23")
    assert (await asked)[0] == 200


async def with_requests(make_pod: MakePod, row: Release) -> tuple[FakePod, asyncio.Task[dict[str, object]]]:
    pod = await make_pod()
    await pod.put(pod.desired())
    engine = await pod.launch(release=row)
    await pod.serving()
    running = asyncio.create_task(pod.generate(300))
    await eventually(lambda: engine.rules.running > 0)
    return pod, running


async def test_in_place_moves_wait_for_the_device_or_retract(make_pod: MakePod, versions: Versions) -> None:
    for row, calls in ((NEWEST, ["pause in_place", "fence", "load v2"]), (OLDEST, ["pause retract", "load v2"])):
        pod, running = await with_requests(make_pod, row)
        assert pod.engine is not None
        wanted = WeightMove("m", versions("2"), Step.CONTINUE, PauseMode.IN_PLACE, KVCache.KEEP)
        await pod.put(pod.desired(move=wanted))
        await pod.until(lambda r: r.move is not None and r.move.reached is Step.CONTINUE)
        assert pod.engine.rules.calls == [*calls, "continue"]
        assert not pod.engine.rules.violations
        await running


async def test_a_flush_under_load_needs_an_abort_on_0_5_17(make_pod: MakePod, versions: Versions) -> None:
    pod, running = await with_requests(make_pod, OLDEST)
    assert pod.engine is not None
    pod.engine.token_seconds = 0.05
    wanted = WeightMove("m1", versions("2"), Step.CONTINUE, timeout_seconds=0.5)
    await pod.put(pod.desired(move=wanted))
    report = await pod.until(lambda r: r.move is not None and r.move.error != "")
    assert report.move is not None
    assert "set weights.pauseMode Abort or weights.kvCache Keep" in report.move.error
    await pod.put(pod.desired(move=WeightMove("m2", versions("2"), Step.CONTINUE, PauseMode.ABORT)))
    await pod.until(lambda r: r.engine.weight_version == "2" and not r.engine.paused)
    assert (await running)["meta_info"] == {"finish_reason": {"type": "abort"}}
    assert not pod.engine.rules.violations
