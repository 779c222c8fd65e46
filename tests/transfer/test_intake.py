"""The receiving process: it ends with its agent, and nothing of it writes into a stage after its answer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sglang_rollout.transfer.intake import Intake, IntakeFailed, TrainerIntake
from sglang_rollout.transfer.stage import reserve_host

OPERATOR = Path(__file__).parents[2] / "operator"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(OPERATOR)}
INTAKE = Intake("t1", "v2", ("127.0.0.1:1",), "a", "pod")
# What receives is played: a thread that no cancellation reaches, as one that waits in a collective.
CHILD = """
import asyncio, sys, time
from types import SimpleNamespace
from sglang_rollout.transfer import intake_child

async def receive(stage, transports, cache, order):
    order.progress(1)
    {body}

intake_child.receive = receive
intake_child.stuck = lambda: {stuck}
sys.argv = ["intake_child", "--folder", {folder!r}]
intake_child.main()
"""


def script(folder: Path, body: str, stuck: bool = False) -> str:
    return CHILD.format(body=body, stuck=stuck, folder=str(folder))


@asynccontextmanager
async def child(folder: Path, body: str, parent: str = "") -> AsyncIterator[asyncio.subprocess.Process]:
    reserve_host(folder, 1 << 16, 1)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", parent or script(folder, body),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=ENVIRONMENT,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def hear(process: asyncio.subprocess.Process, word: str) -> dict[str, Any]:
    assert process.stdout is not None
    async with asyncio.timeout(20):
        while True:
            said: dict[str, Any] = json.loads(await process.stdout.readline())
            if word in said:
                return said


def order() -> bytes:
    words: dict[str, Any] = {
        "transaction": "t", "version": "v", "senders": [], "slot": "a", "receiver": "p", "reference": None,
        "tied_names": [],
    }  # fmt: skip
    return json.dumps({"id": 1, "receive": words}).encode() + b"\n"


async def test_it_ends_at_once_when_its_agent_has_gone(tmp_path: Path) -> None:
    async with child(tmp_path, "await asyncio.to_thread(time.sleep, 60)") as process:
        assert process.stdin is not None
        process.stdin.write(order())
        await hear(process, "progress")
        process.stdin.close()
        begin = time.monotonic()
        async with asyncio.timeout(20):
            await process.wait()
        assert time.monotonic() - begin < 2


async def test_it_ends_with_a_killed_agent_also_while_it_hears_nothing(tmp_path: Path) -> None:
    inner = script(tmp_path, "time.sleep(60)")
    parent = f"""
import subprocess, sys, time
inner = subprocess.Popen([sys.executable, "-c", {inner!r}], stdin=subprocess.PIPE)
inner.stdin.write({order()!r})
inner.stdin.flush()
time.sleep(60)
"""
    async with child(tmp_path, "", parent) as process:
        pid = (await hear(process, "ready"))["ready"]
        await hear(process, "progress")
        process.send_signal(signal.SIGKILL)
        await process.wait()
        await asyncio.sleep(1)
        assert not _lives(pid)


class _Played(TrainerIntake):
    def __init__(self, folder: Path, body: str) -> None:
        program = folder / "python"
        program.write_text(f"#!/bin/sh\nexec {sys.executable} {folder / 'child.py'}\n")
        program.chmod(0o755)
        (folder / "child.py").write_text(script(folder, body, stuck=True))
        super().__init__(folder, python=str(program), env=ENVIRONMENT)


@pytest.mark.parametrize(
    "body",
    ["return SimpleNamespace(root='r', size=1), 0", "raise intake_child.ReceivingFailed('the sender has gone')"],
)
async def test_what_is_stuck_has_ended_before_the_answer_is_passed_on(tmp_path: Path, body: str) -> None:
    """A broken-off collective may write to the slot when its peer wakes up."""
    reserve_host(tmp_path, 1 << 16, 1)
    intake = _Played(tmp_path, body)
    await intake.warm()
    process = intake._process
    assert process is not None
    try:
        received = await intake.receive(INTAKE)
        assert received.root == "r"
    except IntakeFailed:
        assert "ReceivingFailed" in body
    assert process.returncode is not None
    await intake.close()


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
