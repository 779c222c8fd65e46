"""The engine's processes: started in a session of their own, reaped, and all of them killed at the end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Makes this process the parent of every orphan below it, as PID 1 is anyway: so none can be lost."""
    if os.getpid() != 1:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def spawn(argv: Sequence[str], environment: Mapping[str, str]) -> tuple[int, IO[bytes]]:
    """Starts `argv` in a session of its own. Returns its pid and the pipe of its stdout and stderr together.
    Only reap() may wait for it."""
    process = subprocess.Popen(
        list(argv),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    process.returncode = 0  # waited for by reap(): Popen must neither wait for it nor complain
    return process.pid, process.stdout


def reap() -> dict[int, int]:
    """Exit codes (negative: the signal) of every child that has ended, by pid."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)


def kill_all(leader: int, seconds: float = 10.0) -> dict[int, int]:
    """Kills the group of `leader` and everything else below this process, again and again until nothing is left:
    a process may fork while it is being killed. Returns what reap() found."""
    ended: dict[int, int] = {}
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)
        for pid in _descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        ended |= reap()
        if not _descendants(os.getpid()) or time.monotonic() > deadline:
            return ended
        time.sleep(0.02)


def _descendants(root: int) -> list[int]:
    """Processes below `root`, from /proc. Zombies count until they are reaped."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                # The command in field 2 may hold spaces and brackets: fields count from its last bracket.
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def out_of_memory_kills() -> int:
    """How often the kernel's out-of-memory killer has struck in this container (cgroup v2); 0 where unknown."""
    try:
        lines = Path("/sys/fs/cgroup/memory.events").read_text().splitlines()
        return int(dict(line.split() for line in lines)["oom_kill"])
    except (OSError, KeyError, ValueError):
        return 0
