"""What one agent keeps, read by another on the same machine, beside a copy of the same bytes over a bare socket, in
turn, in one run."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .processes import end, line_of

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class PeerFigure:
    """Medians. ours and bare in seconds; ours has every byte checked by the one that takes. spent: seconds of a
    processor in both processes, for a GB. share: of the bare copy's speed."""

    size: int
    bucket_bytes: int
    ours: float
    bare: float
    share: float
    gigabytes_a_second: float
    ours_spent: float
    bare_spent: float

    def to_object(self) -> dict[str, Any]:
        return asdict(self)


async def measure(size: int, bucket_bytes: int, repeats: int) -> PeerFigure:
    folder = Path(tempfile.mkdtemp(prefix="bench-weights-", dir="/dev/shm"))
    started: list[asyncio.subprocess.Process] = []
    try:
        giver = await _start("give", folder / "giver", size, bucket_bytes)
        started.append(giver)
        where = json.loads(await line_of(giver))
        taker = await _start("take", folder / "taker", where["size"], where["agent"], where["bare"], where["root"])
        started.append(taker)
        found = []
        for _ in range(repeats + 1):
            assert taker.stdin is not None
            taker.stdin.write(b"go\n")
            found.append(json.loads(await line_of(taker)))
        # The first one warms up: pages and caches.
        median = {name: statistics.median(one[name] for one in found[1:]) for name in found[0]}
    finally:
        for process in started:
            await end(process)
        shutil.rmtree(folder)
    gigabytes = where["size"] / 1e9
    return PeerFigure(
        size=where["size"],
        bucket_bytes=bucket_bytes,
        ours=median["ours"],
        bare=median["bare"],
        share=median["bare"] / median["ours"],
        gigabytes_a_second=gigabytes / median["ours"],
        ours_spent=median["ours_spent"] / gigabytes,
        bare_spent=median["bare_spent"] / gigabytes,
    )


async def _start(what: str, *words: object) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "bench.weights.peer_side", what, *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'operator'}:{ROOT}"}
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=environment)
