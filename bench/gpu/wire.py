"""python -m bench.gpu.wire: a trainer on GPU 0, an engine with the shipped agent on GPU 1, and weights on the wire
between them while the engine decodes; then an engine over both. Writes wire.json into --out after every step, and
logs.tar.xz at the end. See docs/gpu-benchmark.md."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .commit_faults import agent_killed_in_commit
from .stepwise import Results, running, until_signalled
from .trainer_process import interpreter, torch_environment
from .wire_bench import Bench, Engines
from .wire_faults import agent_killed, receiver_killed, sender_killed
from .wire_steps import SHIPPED, catch_ups, commits, direct, final, many, transfers

MIB = 1 << 20
SIZES_MIB = (64, 256, 512, 2048, 4096)
USUAL_MIB = 512
CPU_BUCKET_BYTES = 32 << 10  # of the tiny shape: many, so that there is a middle
START_SECONDS = 200.0
BARE_SECONDS = 90.0
ON_TWO_GPUS = {"direct", "tp2"}  # parts that cannot be on one
PLAIN_ALL_REDUCE = "--disable-custom-all-reduce"  # SGLang's own compiles kernels and wants symmetric memory


@dataclass(frozen=True)
class Planned:
    """One step. expected: seconds on two H200s with the 8B shape."""

    part: str
    name: str
    engines: Engines
    expected: float
    call: Callable[[], Awaitable[Any]]


def planned(bench: Bench, given: argparse.Namespace) -> list[Planned]:
    """All steps, those that everything else rests on first."""
    sizes = [size * MIB for size in given.sizes] if not given.cpu else [CPU_BUCKET_BYTES]
    usual = USUAL_MIB * MIB if not given.cpu else CPU_BUCKET_BYTES
    large = sizes[-2:]
    # Two ranks of NCCL cannot be on one GPU.
    named = ["Gloo"] if given.cpu else ["PeerCopy"] if given.one_gpu else ["PeerCopy", "NCCL"]
    one, tp2, repeats = Engines.PAIR if "peer" in given.only else Engines.ONE, Engines.TP2, given.repeats
    steps = [
        Planned("first", "first transfers", one, 17, lambda: transfers(bench, ["Auto", *named], [usual], 1)),
        Planned("auto", "Auto", one, 7 * repeats, lambda: transfers(bench, ["Auto"], [SHIPPED, usual], repeats)),
        Planned("commits", "commits", one, 7 * repeats, lambda: commits(bench, SHIPPED, repeats)),
        Planned("peer", "peer catch-up", one, 60, lambda: catch_ups(bench, SHIPPED, 2)),
    ]
    for transport in named:
        count = 3 * len(sizes)
        call = partial(transfers, bench, [transport], sizes, 3)
        steps.append(Planned("sizes", f"sizes, {transport}", one, 3.5 * count, call))
    steps.append(Planned("direct", "direct", one, 15, lambda: direct(bench, [usual, sizes[-1]], 2)))
    for transport in named:
        steps += [
            Planned(
                "kills", f"receiver killed, {transport}", one, 12, partial(receiver_killed, bench, transport, usual)
            ),
            Planned("kills", f"sender killed, {transport}", one, 45, partial(sender_killed, bench, transport, usual)),
            Planned("kills", f"agent killed, {transport}", one, 12, partial(agent_killed, bench, transport, usual)),
        ]
    for point in ("apply:begun", "apply:written"):
        dying = partial(agent_killed_in_commit, bench, point, usual)
        steps.append(Planned("kills", f"agent killed in a commit, {point}", one, 20, dying))
    steps.append(Planned("kills", "commit after all", one, 20, lambda: final(bench, SHIPPED)))
    steps += [
        Planned("tp2", "TP 2: first transfers", tp2, 20, lambda: transfers(bench, ["Auto"], [SHIPPED, usual], 2)),
        Planned("tp2", "TP 2: commits", tp2, 25, lambda: commits(bench, SHIPPED, 3)),
        Planned("tp2", "TP 2: many transfers", tp2, 25, lambda: many(bench, "Auto", usual, 60)),
        Planned("tp2", "TP 2: large buckets", tp2, 22, lambda: transfers(bench, ["Auto"], large, 3)),
    ]
    if not given.cpu:
        steps += [
            Planned("tp2", "TP 2: NCCL", tp2, 12, lambda: transfers(bench, ["NCCL"], [usual], 3)),
            Planned("tp2", "TP 2: many transfers by NCCL", tp2, 25, lambda: many(bench, "NCCL", usual, 60)),
        ]
    steps.append(Planned("tp2", "TP 2: commit after all", tp2, 20, lambda: final(bench, SHIPPED)))
    parts = {*given.only} - (ON_TWO_GPUS if given.one_gpu else set())
    chosen = [step for step in steps if step.part in parts]
    # What only happens once: processes are started, memory is opened, communicators are made.
    return [step for step in steps if step in chosen or (step.part == "first" and step.engines in _engines(chosen))]


def _engines(steps: Sequence[Planned]) -> set[Engines]:
    return {step.engines for step in steps}


async def run(given: argparse.Namespace) -> int:
    bench = Bench(given.work, shape=given.shape, cpu=given.cpu, streams=given.streams, one_gpu=given.one_gpu)
    async with running(bench, given.out, given.seconds) as results:
        await _run(bench, results, planned(bench, given), given)
    return results.exit_code()


async def _run(bench: Bench, results: Results, steps: Sequence[Planned], given: argparse.Namespace) -> None:
    """Steps that share engines are one after the other."""
    first = steps[0].engines
    bare = _no_bare if given.one_gpu else _bare
    if not await results.step("prepare", lambda: bench.prepare(first, bare), 30.0, START_SECONDS):
        return
    for engines in dict.fromkeys(step.engines for step in steps):
        flags = given.tp2_flags.split() if engines is Engines.TP2 else []
        serves = await _start(bench, results, engines, flags)
        if not serves and engines is Engines.TP2 and not flags:
            serves = await _start(bench, results, engines, [PLAIN_ALL_REDUCE])
        for step in steps if serves else ():
            if step.engines is engines:
                await results.step(step.name, step.call, step.expected)


async def _start(bench: Bench, results: Results, engines: Engines, flags: Sequence[str]) -> bool:
    name = " ".join([f"start, {engines}", *flags])
    return await results.step(name, lambda: bench.start(engines, flags), 60.0, START_SECONDS)


async def _bare(cpu: bool) -> dict[str, Any]:
    words = [interpreter(cpu), "-m", "bench.gpu.bare", *(["--cpu"] if cpu else [])]
    process = await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE, env=torch_environment())
    try:
        out, _ = await asyncio.wait_for(process.communicate(), BARE_SECONDS)
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        return found
    except (TimeoutError, ValueError, IndexError) as error:
        return {"failed": repr(error)}
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _no_bare(cpu: bool) -> dict[str, Any]:
    return {"left out": "it needs two GPUs"}


PARTS = ("first", "auto", "commits", "peer", "sizes", "direct", "kills", "tp2")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.wire", description=__doc__)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--cpu", action="store_true", help="a dry run over Gloo, on the e2e tests' SGLang")
    parser.add_argument("--one-gpu", action="store_true", help="trainer and engines share it, without NCCL and TP 2")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--work", type=Path, default=Path("/dev/shm/sglang-rollout-wire"))
    parser.add_argument("--out", type=Path, default=Path("out/wire"))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts of the run; all by default")
    parser.add_argument("--seconds", type=float, default=3600.0, help="for all: what does not fit is left out")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES_MIB, help="of buckets, MiB")
    parser.add_argument("--tp2-flags", default="", help="more of SGLang's for the engine over both GPUs, in one word")
    return until_signalled(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
