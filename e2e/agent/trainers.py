"""A trainer's process (live_trainer) as the tests see it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from e2e.sglang_cpu import environment, models
from sglang_rollout.protocol.weights import Source, SourceKind, Step, WeightMove, WeightVersion

ROOT = Path(__file__).parents[2]
MODES = {"direct": SourceKind.DIRECT, "colocated": SourceKind.COLOCATED}


class Trainer:
    """The process of live_trainer. Its versions are of the tiny models."""

    def __init__(self, mode: str, *names: str, fault: str = "", seconds: float = 60.0) -> None:
        versions = {name: str(models.path(name)) for name in names}
        orders = {"versions": versions, "mode": mode, "fault": fault, "seconds": seconds}
        paths = os.pathsep.join([str(ROOT / "operator"), str(ROOT)])
        self.kind = MODES[mode]
        self.process = subprocess.Popen(
            [str(environment.interpreter()), "-m", "e2e.agent.live_trainer", json.dumps(orders)],
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.port = 0
        self._left = len(names)

    async def _line(self, word: str) -> str:
        assert self.process.stdout is not None
        while line := await asyncio.wait_for(asyncio.to_thread(self.process.stdout.readline), 60):
            if line.startswith(word + " "):
                return line.removeprefix(word).strip()
        raise AssertionError(f"the trainer ended without {word!r}")

    async def listening(self) -> Trainer:
        self.port = int(await self._line("port"))
        return self

    async def done(self, *, by_itself: bool = False) -> dict[str, str]:
        """What came of this version, by receiver; then it serves the next, if it has one. It is told that it is over,
        unless it ends it by itself."""
        assert self.process.stdin is not None
        if not by_itself and self.process.poll() is None:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        found = dict(json.loads(await self._line("done")))
        self._left -= 1
        if self._left:
            await self.listening()
        return found

    def move(self, version: str, seconds: float = 60.0, **source: Any) -> WeightMove:
        return WeightMove(
            f"m-{version}-{os.urandom(3).hex()}",
            WeightVersion(version, ""),
            Step.APPLY,
            timeout_seconds=seconds,
            source=Source(self.kind, senders=[f"127.0.0.1:{self.port}"], members=1, **source),
        )

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
