"""The engine container's preStop hook, as a process."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from sglang_rollout.protocol import pod as paths

from .fake_pod import FakePod, eventually

SOURCES = str(Path(__file__).parents[2] / "operator")


async def hook(run_dir: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "sglang_rollout.agent.drain",
        env={**os.environ, "PYTHONPATH": SOURCES, paths.ENV_RUN_DIR: str(run_dir), paths.ENV_DRAIN_SECONDS: "1"},
        stderr=asyncio.subprocess.PIPE,
    )


async def test_it_returns_when_the_requests_have_ended(serving: FakePod) -> None:
    assert serving.engine is not None
    rules = serving.engine.rules
    running = asyncio.create_task(serving.generate(100))
    await eventually(lambda: rules.running > 0)
    process = await hook(serving.settings.run_dir)
    assert await asyncio.wait_for(process.wait(), 20) == 0
    assert len((await running)["versions"]) == 100
    report = await serving.report()
    assert report.drained
    assert (await serving.call("GET", paths.PATH_READY))[0] == 503


async def test_it_says_that_there_is_no_agent(tmp_path: Path) -> None:
    process = await hook(tmp_path)
    _, error = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 1
    assert b"the agent does not answer" in error
