"""The trainer of the wire's measurements, as a process that takes orders and answers."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
DONE_SECONDS = 120.0
LEFT_TO_ITSELF_SECONDS = 5.0
KILLED_SECONDS = 10.0  # in which the driver takes its memory back


class TrainerProcess:
    def __init__(self, shape: str, cpu: bool, log: Path) -> None:
        words = json.dumps({"shape": shape, "device": "cpu" if cpu else "cuda:0"})
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [interpreter(cpu), "-m", "bench.gpu.trainer", words],
                env=torch_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.port = 0
        self._said: list[dict[str, Any]] = []
        self._news = asyncio.Condition()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await asyncio.to_thread(self.process.stdout.readline):
            if line.startswith("{"):
                await self._add(json.loads(line))
        await self._add({"ended": self.process.wait()})

    async def _add(self, words: dict[str, Any]) -> None:
        async with self._news:
            self._said.append(words)
            self._news.notify_all()

    async def said(self, key: str, value: Any = None) -> dict[str, Any]:
        """The first thing that it said, or says, of this; taken away. Raises RuntimeError when it has ended."""
        async with self._news:
            while True:
                for words in self._said:
                    if key in words and value in (None, words[key]):
                        self._said.remove(words)
                        return words
                if any("ended" in words for words in self._said):
                    raise RuntimeError(f"the trainer has ended without a word of {key}")
                await self._news.wait()

    async def ready(self) -> None:
        self.port = int((await self.said("port"))["port"])

    async def done(self, label: str, *, waits: bool = True) -> dict[str, Any]:
        """What came of a sending. One whose agents are gone `waits` for others: it is left to itself then."""
        try:
            async with asyncio.timeout(DONE_SECONDS if waits else LEFT_TO_ITSELF_SECONDS):
                return await self.said("done", label)
        except TimeoutError:
            return {"error": "it still waits for agents", "at": time.monotonic()}

    def order(self, **words: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()

    async def kill(self) -> None:
        """Raises subprocess.TimeoutExpired when it does not die."""
        self.process.kill()
        await asyncio.to_thread(self.process.wait, KILLED_SECONDS)
        self._reader.cancel()


def torch_environment() -> dict[str, str]:
    """For the interpreter that has torch; what the client needs besides comes after its own."""
    paths = [*(p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p), str(ROOT), str(ROOT / "operator")]
    paths.append(str(Path(httpx.__file__).parents[1]))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "4"}


def interpreter(cpu: bool) -> str:
    if not cpu:
        return sys.executable
    from e2e.sglang_cpu import environment

    return str(environment.interpreter())
