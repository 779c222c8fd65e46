"""Runs programs for as long as its starter lives: its standard input is a pipe, and the end of it is the starter's end.

Started as a script by `ApiServer`, with the standard library only. The first line of standard input is JSON:
{"programs": [{"argv": [...], "log": "path"}], "remove": ["folder"]}. However the starter ends (SIGKILL as well),
the programs are killed and the folders removed. When one program ends by itself, the others are killed and the
folders stay for the starter to read. If this process is killed itself, the kernel kills the programs
(PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import ctypes
import json
import select
import shutil
import signal
import subprocess
import sys
import time

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a terminal's Ctrl-C goes to the starter, who then closes the pipe
    order = json.loads(sys.stdin.readline())
    children: list[subprocess.Popen[bytes]] = []
    try:
        for program in order["programs"]:
            with open(program["log"], "ab") as log:
                children.append(
                    subprocess.Popen(
                        program["argv"],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        preexec_fn=_die_with_parent,
                    )
                )
        while all(child.poll() is None for child in children):
            if select.select([sys.stdin], [], [], 0.2)[0]:
                break
        else:
            return 1
    finally:
        _end(children)
    for folder in order["remove"]:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _end(children: list[subprocess.Popen[bytes]]) -> None:
    """Nothing here needs a clean end: the data is thrown away."""
    for child in reversed(children):
        child.kill()
    deadline = time.monotonic() + 10
    for child in children:
        child.wait(timeout=max(0.1, deadline - time.monotonic()))


if __name__ == "__main__":
    sys.exit(main())
