"""python -m bench.gpu.wire: a trainer on GPU 0, an engine with the shipped agent on GPU 1, and weights on the wire
between them while the engine decodes. Writes wire.json into --out after every step. See docs/gpu-benchmark.md."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from .wire_faults import agent_killed, receiver_killed, sender_killed
from .wire_steps import Bench, commits, direct, interpreter, peer_catch_up, torch_environment, transfers

STEP_SECONDS = 100.0
MIB = 1 << 20
SIZES_MIB = (64, 256, 512, 2048, 4096)


class Results:
    def __init__(self, out: Path) -> None:
        self._file = out / "wire.json"
        self._begin = time.monotonic()
        self.found: dict[str, Any] = {"arguments": sys.argv[1:]}
        self.failed: list[str] = []

    async def step(self, name: str, call: Callable[[], Awaitable[Any]], seconds: float = STEP_SECONDS) -> bool:
        """A failure is noted and the next step tried."""
        print(f"--- {name} (at {time.monotonic() - self._begin:.0f} s)", flush=True)
        try:
            async with asyncio.timeout(seconds):
                self.found[name] = await call()
            print(json.dumps(self.found[name], indent=None), flush=True)
        except Exception:
            self.failed.append(name)
            self.found[f"{name}: failed"] = traceback.format_exc()[-3000:]
            traceback.print_exc()
        self._file.write_text(json.dumps(self.found, indent=1))
        return name not in self.failed


async def run(given: argparse.Namespace) -> int:
    given.out.mkdir(parents=True, exist_ok=True)
    results = Results(given.out)
    bench = Bench(given.work, given.out, shape=given.shape, cpu=given.cpu, streams=given.streams)
    sizes = [size * MIB for size in given.sizes] if not given.cpu else [MIB // 4]
    usual = sizes[len(sizes) // 2]
    named = ["PeerCopy", "NCCL"] if not given.cpu else ["Gloo"]
    step = results.step
    try:
        if not await step("start", lambda: bench.start(second=not given.no_second, bare=_bare), 300.0):
            return 1
        await step("first transfers", lambda: transfers(bench, ["Auto", *named], [usual], 1))
        await step("Auto, usual bucket", lambda: transfers(bench, ["Auto"], [usual], given.repeats))
        await step("commits", lambda: commits(bench, usual, given.repeats))
        if not given.no_second:
            await step("peer catch-up", lambda: peer_catch_up(bench))
        for transport in named:
            await step(transport, partial(transfers, bench, [transport], sizes, 2))
        await step("direct", lambda: direct(bench, [sizes[-3] if len(sizes) > 2 else usual, sizes[-1]], 2))
        for transport in named:
            await step(f"receiver killed, {transport}", partial(receiver_killed, bench, transport, usual))
        await step("agent killed", lambda: agent_killed(bench, "Auto", usual))
        # The last one is that in which both sides stand in one collective.
        await step(f"sender killed, {named[-1]}", partial(sender_killed, bench, named[-1], usual))
        await step("commit after all", bench.final)
        if not given.cpu and not given.no_tp2 and await step("TP 2: start", bench.start_tp2, 200.0):
            await step("TP 2: first transfers", lambda: transfers(bench, ["Auto"], [usual], 1))
            await step("TP 2: transfers", lambda: transfers(bench, ["Auto"], [usual], 3))
            await step("TP 2: commits", lambda: commits(bench, usual, 3))
            await step("TP 2: commit after all", bench.final)
    finally:
        await bench.stop()
        shutil.rmtree(given.work, ignore_errors=True)
    print("failed: " + (", ".join(results.failed) or "nothing"))
    return 1 if results.failed else 0


async def _bare(cpu: bool) -> dict[str, Any]:
    words = [interpreter(cpu), "-m", "bench.gpu.bare", *(["--cpu"] if cpu else [])]
    process = await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE, env=torch_environment())
    try:
        out, _ = await asyncio.wait_for(process.communicate(), 90)
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        return found
    except (TimeoutError, ValueError, IndexError) as error:
        if process.returncode is None:
            process.kill()
            await process.wait()
        return {"failed": repr(error)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.wire", description=__doc__)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--cpu", action="store_true", help="a dry run over Gloo, on the e2e tests' SGLang")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--work", type=Path, default=Path("/dev/shm/sglang-rollout-wire"))
    parser.add_argument("--out", type=Path, default=Path("out/wire"))
    parser.add_argument("--no-second", action="store_true", help="without the second engine, beside the trainer")
    parser.add_argument("--no-tp2", action="store_true")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES_MIB, help="of buckets, MiB")
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
