"""The agent's supervisor: an agent that dies is started again beside what it left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

CODE = """
import sys
from sglang_rollout.agent import supervisor
supervisor.SHORT_SECONDS = {short}
sys.exit(supervisor.Supervisor((sys.executable, "-c", {agent!r})).run())
"""
LIVES = """
import os, pathlib, signal, subprocess, sys, time
seen = pathlib.Path({folder!r}) / "lives"
lives = seen.read_text().split() if seen.exists() else []
seen.write_text(" ".join([*lives, str(os.getpid())]))
{then}
"""


def supervised(folder: Path, then: str, short: float = 0.0) -> subprocess.Popen[bytes]:
    agent = LIVES.format(folder=str(folder), then=then)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen([sys.executable, "-c", CODE.format(short=short, agent=agent)], env=environment)


def lives(folder: Path) -> list[str]:
    seen = folder / "lives"
    return seen.read_text().split() if seen.exists() else []


def test_an_agent_that_dies_is_started_again_and_one_that_ends_is_not(tmp_path: Path) -> None:
    then = "sys.exit(0) if len(lives) == 2 else os.kill(os.getpid(), signal.SIGKILL)"
    assert supervised(tmp_path, then).wait(30) == 0
    assert len(lives(tmp_path)) == 3


@pytest.mark.parametrize(("code", "count"), [(2, 1), (1, 5)])
def test_what_no_restart_mends_is_left_to_the_kubelet(tmp_path: Path, code: int, count: int) -> None:
    assert supervised(tmp_path, f"sys.exit({code})", short=60.0).wait(30) == code
    assert len(lives(tmp_path)) == count


def test_the_pod_s_end_is_the_agent_s(tmp_path: Path) -> None:
    then = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); open(seen.with_name('up'), 'w'); time.sleep(30)"
    process = supervised(tmp_path, then)
    end = time.monotonic() + 20
    while not (tmp_path / "up").exists() and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert len(lives(tmp_path)) == 1
