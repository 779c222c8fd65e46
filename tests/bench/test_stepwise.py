"""A run of the GPU bench: every step is told, one that fails stops nothing, and the end leaves nothing but results."""

from __future__ import annotations

import asyncio
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import stepwise
from bench.gpu.stepwise import STOP_SECONDS, Results, running
from bench.gpu.wire_bench import Bench


class _Fake(Bench):
    """One without processes."""

    def __init__(self, work: Path, *, hangs: bool = False) -> None:
        super().__init__(work, shape="tiny", cpu=True, streams=1)
        self.stops = 0
        self._hangs = hangs

    async def stop(self) -> None:
        self.stops += 1
        (self.logs / "engine.log").write_text("said")
        if self._hangs:
            await asyncio.Event().wait()


async def _three() -> int:
    return 3


async def _broken() -> Any:
    raise ValueError("no such bucket")


def _told(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "wire.json").read_text())
    return found


async def test_a_step_that_fails_is_told_and_the_next_one_tried(tmp_path: Path) -> None:
    results = Results(tmp_path, 1000.0)
    assert not await results.step("broken", _broken, 1.0)
    assert await results.step("three", _three, 1.0)
    found = _told(tmp_path)
    assert found["three"] == 3
    assert "no such bucket" in found["broken: failed"]
    assert (results.failed, results.exit_code()) == (["broken"], 1)


async def test_what_does_not_fit_is_not_begun_and_what_is_shorter_is(tmp_path: Path) -> None:
    results = Results(tmp_path, STOP_SECONDS + 60.0)
    assert not await results.step("long", _three, 100.0)
    assert await results.step("short", _three, 10.0)
    assert "not begun" in _told(tmp_path)["long: failed"]


async def _cancelled() -> None:
    raise asyncio.CancelledError


@pytest.mark.parametrize("ends", [_three, _cancelled])
async def test_the_end_keeps_logs_and_nothing_else(tmp_path: Path, ends: Any) -> None:
    bench, out = _Fake(tmp_path / "work"), tmp_path / "out"
    try:
        async with running(bench, out, 1000.0) as results:
            await results.step("only", ends, 1.0)
    except asyncio.CancelledError:
        assert ends is _cancelled
    with tarfile.open(out / "logs.tar.xz") as packed:
        assert packed.getnames() == ["engine.log"]
    assert bench.stops == 1
    assert not bench.work.exists()


async def test_a_bench_that_does_not_stop_is_said_and_its_logs_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stepwise, "STOP_SECONDS", 0.0)
    bench, out = _Fake(tmp_path / "work", hangs=True), tmp_path / "out"
    with pytest.raises(TimeoutError):
        async with running(bench, out, 1000.0):
            pass
    assert (out / "logs.tar.xz").exists()
    assert not bench.work.exists()
