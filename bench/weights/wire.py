"""Staging over Gloo beside a bare Gloo broadcast of the same bytes to as many processes, in turn, in one run."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import statistics
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from e2e.sglang_cpu import environment
from sglang_rollout.transfer.intake import Intake, IntakeFailed, Received, TrainerIntake
from sglang_rollout.transfer.manifest import Tensor
from sglang_rollout.transfer.stage import reserve_host

from .model import shapes, total
from .processes import ANSWER_SECONDS, end, line_of

ROOT = Path(__file__).parents[2]

TRIES = 10


@dataclass(frozen=True)
class WireFigure:
    """Medians. ours and bare in seconds, from the first bucket until every process holds all of them; ours has every
    byte checked on both sides. share: of the bare broadcast's speed."""

    size: int
    receivers: int
    bucket_bytes: int
    ours: float
    bare: float
    share: float
    gigabytes_a_second: float

    def to_object(self) -> dict[str, Any]:
        return asdict(self)


def python_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT / 'operator'}:{ROOT}", "OMP_NUM_THREADS": "1"}


async def measure(size: int, receivers: int, bucket_bytes: int, repeats: int) -> WireFigure:
    listed = shapes(size)
    bytes_ = total(listed)
    reference = {name: Tensor(name, "BF16", shape) for name, shape in listed.items()}
    folder = Path(tempfile.mkdtemp(prefix="bench-weights-", dir="/dev/shm"))
    try:
        async with _trainer(size) as trainer, _bare(receivers + 1, bucket_bytes, bytes_) as bare:
            intakes = []
            for number in range(receivers):
                reserve_host(folder / str(number), bytes_ + (1 << 20), 1)
                intakes.append(
                    TrainerIntake(folder / str(number), python=str(environment.interpreter()), env=python_environment())
                )
            try:
                for intake in intakes:
                    await intake.warm()
                port = json.loads(await line_of(trainer))["port"]
                ours, without = [], []
                for turn in range(repeats + 1):  # the first of each warms up: groups, pages, caches
                    found = await _send(trainer, intakes, port, reference, bucket_bytes, f"v{turn}")
                    _order(bare, b"go\n")
                    plain = float(await line_of(bare))
                    if turn:
                        ours.append(found)
                        without.append(plain)
            finally:
                for intake in intakes:
                    await intake.close()
    finally:
        shutil.rmtree(folder)
    mine, theirs = statistics.median(ours), statistics.median(without)
    return WireFigure(bytes_, receivers, bucket_bytes, mine, theirs, theirs / mine, bytes_ / mine / 1e9)


async def _send(
    trainer: asyncio.subprocess.Process,
    intakes: list[TrainerIntake],
    port: int,
    reference: dict[str, Tensor],
    bucket_bytes: int,
    version: str,
) -> float:
    _order(trainer, json.dumps({"version": version, "bucket_bytes": bucket_bytes}).encode() + b"\n")
    orders = [
        Intake(
            transaction=version,
            version=version,
            senders=(f"127.0.0.1:{port}",),
            slot="a",
            receiver=f"pod-{number}",
            transport="Gloo",
            members=len(intakes),
            reference=reference,
            timeout_seconds=ANSWER_SECONDS,
        )
        for number in range(len(intakes))
    ]
    received = await asyncio.gather(*(_receive(one, order) for one, order in zip(intakes, orders, strict=True)))
    report = json.loads(await line_of(trainer))
    assert {one.root for one in received} == {report["root"]}
    return float(report["seconds"])


async def _receive(intake: TrainerIntake, order: Intake) -> Received:
    """The trainer may not have begun yet, which costs nothing: it counts from the first agent's greeting."""
    for _ in range(TRIES - 1):
        try:
            return await intake.receive(order)
        except IntakeFailed:
            await asyncio.sleep(0.05)
    return await intake.receive(order)


@asynccontextmanager
async def _trainer(size: int) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await _start("bench.weights.trainer", str(size))
    try:
        yield process
    finally:
        await end(process)


@asynccontextmanager
async def _bare(world: int, bucket: int, size: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """Its rank 0."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    words = [str(world), port, str(bucket), str(size // bucket), str(size % bucket)]
    ranks = [await _start("bench.weights.bare", str(rank), *words) for rank in range(world)]
    try:
        yield ranks[0]
    finally:
        for rank in reversed(ranks):  # the others wait for the first one and would complain
            await end(rank)


async def _start(module: str, *words: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        str(environment.interpreter()), "-m", module, *words,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=python_environment(),
    )  # fmt: skip


def _order(process: asyncio.subprocess.Process, line: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(line)
