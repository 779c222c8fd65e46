"""The end of an agent that cannot go on: nobody may take what it said last for what is so."""

from __future__ import annotations

import asyncio
import errno
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from sglang_rollout.agent import journal
from sglang_rollout.agent.__main__ import causes
from sglang_rollout.agent.process import running_agent
from sglang_rollout.protocol import pod as paths
from sglang_rollout.protocol.wire import dumps
from sglang_rollout.serving import terms

from .conftest import Versions
from .fake_pod import FakePod


@pytest.mark.parametrize("name", ["lease-term", "journal.json"])
async def test_an_agent_that_cannot_keep_its_state_answers_nobody(
    name: str, tmp_path: Path, versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        if path.name == name:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        path.write_bytes(data)

    for module in (journal, terms):
        monkeypatch.setattr(module, "write_private", full)
    pod = FakePod(tmp_path / "pod", versions("1"))
    address = (pod.settings.pod_ip, pod.settings.agent_port)

    async def run_into_it() -> None:
        async with running_agent(pod.settings, pod.settings.pod_ip) as loop, aiohttp.ClientSession() as pod.session:
            status, _ = await pod.call("PUT", paths.PATH_DESIRED, dumps(pod.desired()))
            assert status == 500
            await loop

    with pytest.raises(ExceptionGroup) as failure:
        await run_into_it()
    assert name in causes(failure.value)[0]
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(*address)


STUCK = """
import asyncio, sys, threading
from sglang_rollout.agent import __main__ as agent

async def serve(settings):
    asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
    raise ExceptionGroup("tasks", [OSError("No space left on device")])

agent.serve = serve
agent.AgentSettings.read = lambda environment: None
sys.exit(agent.main())
"""


def test_no_thread_keeps_an_agent_that_cannot_go_on() -> None:
    ended = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout.splitlines()[-1].endswith("the agent cannot go on: OSError: No space left on device")


def test_all_causes_are_told_in_one_line() -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "/var/lib/a")
    nested = ExceptionGroup("tasks", [full, ExceptionGroup("more", [ValueError("b")])])

    assert causes(nested) == ["OSError: [Errno 28] No space left on device: '/var/lib/a'", "ValueError: b"]
