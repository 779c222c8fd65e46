"""python -m bench.gpu.kernel_free: ways to bring bytes from a process on GPU 0 to one on GPU 1, beside an engine that
decodes there: how fast each is, and what it costs of decoding. Writes wire.json into --out after every step, and
logs.tar.xz at the end. See docs/gpu-benchmark.md.

NIXL is only tried where --nixl names a folder with its unpacked wheel. With --one-gpu both processes and the engine are
on GPU 0."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from .stepwise import Results, running, until_signalled
from .trainer_process import interpreter, torch_environment
from .transports_in_logs import notes, read_by
from .wire_bench import Bench, Engines

MIB = 1 << 20
BUCKETS = (512 * MIB, 2048 * MIB)
SECONDS = 60.0  # for one way, the start of its processes included
EXPECTED = 22.0
ROW_SECONDS = 5.0  # for the transfers of one row
KERNEL_FREE = "cuda_ipc"  # UCX's transport that copies from GPU to GPU


@dataclass(frozen=True)
class Way:
    """name: in kernel_free_pair.WAYS. environment: of its two processes."""

    name: str
    environment: dict[str, str] = field(default_factory=dict)


_NCCL = {"NCCL_NVLS_ENABLE": "0", "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,P2P,ENV"}
PEER_COPY = Way("PeerCopy")
MORE_STREAMS = tuple(Way(f"PeerCopy, {count} streams") for count in (2, 4))
ON_GPUS = (
    PEER_COPY,
    Way("NCCL", {**_NCCL, "NCCL_CUMEM_ENABLE": "0"}),
    Way("NCCL copy engines", {**_NCCL, "NCCL_CUMEM_ENABLE": "1", "NCCL_CTA_POLICY": "2"}),
    Way("NCCL P2P by memcpy", {**_NCCL, "NCCL_CUMEM_ENABLE": "0", "NCCL_P2P_USE_CUDA_MEMCPY": "1"}),
    *MORE_STREAMS,
)
ON_CPU = (Way("Gloo"),)
ON_ONE_GPU = (PEER_COPY,)  # which two ranks of NCCL cannot share
NIXL = Way("NIXL", {"UCX_LOG_LEVEL": "info", "UCX_PROTO_INFO": "y"})


class Pair:
    """The two processes. log: what they say beside answers."""

    def __init__(self, way: Way, words: dict[str, Any], cpu: bool, log: Path) -> None:
        self._way, self._words, self._cpu, self._log = way, words, cpu, log

    async def __aenter__(self) -> Pair:
        with self._log.open("wb") as errors:
            self._process = await asyncio.create_subprocess_exec(
                interpreter(self._cpu),
                *("-m", "bench.gpu.kernel_free_pair", json.dumps({"way": self._way.name, **self._words})),
                env={**torch_environment(), **self._way.environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # so that both can be ended, whatever they hang in
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    async def answer(self) -> dict[str, Any]:
        """Raises RuntimeError with its last words when it has ended."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            if line.startswith(b"{"):
                found: dict[str, Any] = json.loads(line)
                return found
            with self._log.open("ab") as log:
                log.write(line)
        last = [text for text in self._log.read_text(errors="replace").splitlines() if text.strip()][-6:]
        raise RuntimeError(f"it ended: {' | '.join(last)}"[-1500:])

    async def move(self, bucket: int, repeats: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"bucket": bucket, "repeats": repeats}).encode() + b"\n")
        await self._process.stdin.drain()
        return await self.answer()


async def tried(bench: Bench, way: Way, buckets: Sequence[int], repeats: int, nixl: str) -> dict[str, Any]:
    """Of each size of bucket, several transfers in a row while the engine decodes. A failure is a result."""
    log = bench.logs / f"{way.name.replace(' ', '-')}.log"
    words = {"size": bench.size, "cuda": not bench.cpu, "gpus": _gpus(bench), "buckets": buckets, "nixl": nixl}
    found: dict[str, Any] = {}
    begin = time.monotonic()
    try:
        async with asyncio.timeout(SECONDS), Pair(way, words, bench.cpu, log) as pair:
            ready = await pair.answer()
            found["bytes"], first = ready["bytes"], min(ready["first"])
            count = max(2, min(repeats, int(ROW_SECONDS / first)))
            found["ready, s"] = round(time.monotonic() - begin, 1)
            for bucket in buckets:
                found[f"{bucket / MIB:g} MiB"] = await _beside_decoding(bench, pair, bucket, count)
    except TimeoutError:
        found["failed"] = f"not done within {SECONDS:.0f} s"
    except (RuntimeError, ValueError) as error:
        found["failed"] = str(error)
    return _chosen(way, bench.cpu, log.read_text(errors="replace")) | found


def _gpus(bench: Bench) -> tuple[int, int]:
    """The giver's and the taker's."""
    return (0, 0) if bench.one_gpu else (0, 1)


def _chosen(way: Way, cpu: bool, log: str) -> dict[str, Any]:
    """NIXL that reads in another way than by a copy between GPUs works, slowly, and says nothing."""
    if way is not NIXL:
        return {"log": notes(log)}
    rows = read_by(log)
    found = {"read by": rows, "log": notes(log)}
    if cpu or any(KERNEL_FREE in row for row in rows):
        return found
    return {**found, "failed": f"UCX does not read by {KERNEL_FREE}"}


async def _beside_decoding(bench: Bench, pair: Pair, bucket: int, repeats: int) -> dict[str, Any]:
    await bench.begin_alike()
    moved = await pair.move(bucket, repeats)
    begin, end, each = moved["begin"], moved["end"], moved["each"]
    seen = await asyncio.to_thread(bench.streams.around, begin, end)
    meanwhile = len(bench.streams.stamps(begin, end)) / (end - begin)
    return {
        "n": repeats,
        "ms": round(median(each) * 1e3, 2),
        "ms, range": [round(min(each) * 1e3, 2), round(max(each) * 1e3, 2)],
        "GB/s": round(bench.size / 1e9 / median(each), 1),
        "decode of the rate before and behind": round(meanwhile / seen.rate, 3),
        "decode lost per transfer, ms": round(seen.lost * 1e3 / repeats, 2),
        "longest token gap, ms": round(seen.gap * 1e3, 1),
        "decode, tok/s": round(seen.rate),
    }


def ways(cpu: bool, one_gpu: bool, nixl: str) -> list[Way]:
    """In the order in which a run that is cut short should tell them."""
    known = ON_CPU if cpu else ON_ONE_GPU if one_gpu else ON_GPUS
    return [*known[:3], *([NIXL] if nixl else []), *known[3:]]


async def measure(bench: Bench, results: Results, repeats: int, nixl: str, only: Sequence[str]) -> None:
    """A step for each way, on a bench whose engine decodes; each ends what it starts."""
    buckets = BUCKETS if not bench.cpu else (bench.size // 4, bench.size)
    for way in (way for way in ways(bench.cpu, bench.one_gpu, nixl) if not only or way.name in only):
        call = partial(tried, bench, way, buckets, repeats, nixl)
        await results.step(f"kernel-free: {way.name}", call, EXPECTED, SECONDS + 20.0)


async def run(given: argparse.Namespace) -> int:
    bench = _NoTrainer(given.work, shape=given.shape, cpu=given.cpu, streams=given.streams, one_gpu=given.one_gpu)
    async with running(bench, given.out, given.seconds) as results:
        if await results.step("start", bench.begin, 60.0, 200.0):
            await measure(bench, results, given.repeats, given.nixl, given.only)
    return results.exit_code()


class _NoTrainer(Bench):
    async def begin(self) -> dict[str, Any]:
        self._launch(Engines.ONE)
        await asyncio.to_thread(self._write_checkpoint)
        return await self.start(Engines.ONE)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.kernel_free", description=__doc__)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--cpu", action="store_true", help="a dry run with host memory")
    parser.add_argument("--one-gpu", action="store_true", help="all share it; PeerCopy and NIXL only")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=20, help="transfers of each kind, one after the other")
    parser.add_argument("--only", nargs="+", default=(), help="names of ways, all by default")
    parser.add_argument("--nixl", default="", help="folder with NIXL's unpacked wheel (nixl-cu13)")
    parser.add_argument("--work", type=Path, default=Path("/dev/shm/sglang-rollout-kernel-free"))
    parser.add_argument("--out", type=Path, default=Path("out/kernel-free"))
    parser.add_argument("--seconds", type=float, default=600.0, help="for all: what does not fit is left out")
    return until_signalled(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
