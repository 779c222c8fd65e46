"""A run of a bench: steps, of which each is written down when it is over, and an end at which logs are kept and nothing
else is left."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import sys
import tarfile
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from .wire_bench import Bench

PATIENCE = 3.0
STOP_SECONDS = 20.0  # of those that a run may take, left for ending


class Results:
    """In wire.json. seconds: for all of it, after which nothing new is begun."""

    def __init__(self, out: Path, seconds: float) -> None:
        self._file = out / "wire.json"
        self._begin = time.monotonic()
        self._seconds = seconds - STOP_SECONDS
        self.found: dict[str, Any] = {"arguments": sys.argv[1:]}
        self.failed: list[str] = []

    @property
    def spent(self) -> float:
        return time.monotonic() - self._begin

    async def step(self, name: str, call: Callable[[], Awaitable[Any]], expected: float, seconds: float = 0.0) -> bool:
        """A failure is noted and the next step tried. expected: seconds; it gets PATIENCE times as many. seconds: until
        it is given up, if not those."""
        left = self._seconds - self.spent
        if left < expected:
            self._fail(name, f"not begun: {left:.0f} s are left and it takes about {expected:.0f}")
            return False
        print(f"--- {name} (at {self.spent:.0f} s)", flush=True)
        try:
            async with asyncio.timeout(min(left, seconds or 20.0 + PATIENCE * expected)):
                self.found[name] = await call()
            print(json.dumps(self.found[name], indent=None), flush=True)
        except Exception:
            traceback.print_exc()
            self._fail(name, traceback.format_exc()[-3000:])
        self._write()
        return name not in self.failed

    def exit_code(self) -> int:
        """Prints what failed."""
        print(f"failed: {', '.join(self.failed) or 'nothing'} (after {self.spent:.0f} s)")
        return 1 if self.failed else 0

    def _fail(self, name: str, why: str) -> None:
        self.failed.append(name)
        self.found[f"{name}: failed"] = why
        print(f"{name}: {why.splitlines()[-1]}", flush=True)
        self._write()

    def _write(self) -> None:
        self._file.write_text(json.dumps(self.found | {"seconds": round(self.spent, 1)}, indent=1))


@asynccontextmanager
async def running(bench: Bench, out: Path, seconds: float) -> AsyncIterator[Results]:
    """A bench for which steps may start what they need. However they end: it is stopped, the processes' logs are packed
    into `out`, and its folder is removed. Raises TimeoutError when it does not stop within STOP_SECONDS."""
    out.mkdir(parents=True, exist_ok=True)
    bench.logs.mkdir(parents=True, exist_ok=True)
    try:
        yield Results(out, seconds)
    finally:
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await bench.stop()
        finally:
            _pack(bench.logs, out / "logs.tar.xz")
            shutil.rmtree(bench.work, ignore_errors=True)


def _pack(folder: Path, archive: Path) -> None:
    with tarfile.open(archive, "w:xz") as packed:
        for log in sorted(folder.iterdir()):
            packed.add(log, log.name)


def until_signalled(run: Coroutine[Any, Any, int]) -> int:
    """Its exit code. What was started is ended, and logs are kept, also when SIGTERM says that somebody's patience has
    ended."""
    return asyncio.run(_cancelled_by_signals(run))


async def _cancelled_by_signals(run: Coroutine[Any, Any, int]) -> int:
    work = asyncio.ensure_future(run)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, work.cancel)
    return await work
