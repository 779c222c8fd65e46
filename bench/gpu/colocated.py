"""python -m bench.gpu.colocated: a trainer and an engine with the shipped agent on one GPU, weights handed over by CUDA
IPC while the engine is paused. Writes wire.json into --out after every step."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from e2e.agent.local_pod import LocalPod
from sglang_rollout.protocol import pod
from sglang_rollout.protocol.weights import PauseMode, SourceKind, Step

from .memory import used_gibibytes
from .pods import GpuPod
from .wire import Results
from .wire_bench import Bench, Engines

MIB = 1 << 20
MODES = (PauseMode.RETRACT, PauseMode.IN_PLACE)
GIVEN_BACK_SECONDS = 2.0  # until memory that nobody has mapped is free again


class OneGpu(Bench):
    """Engine without a stage, and trainer, on the first GPU that this process sees."""

    def used(self) -> float:
        """GiB of the GPU's memory, by all processes."""
        return 0.0 if self.cpu else used_gibibytes()

    async def begin(self) -> dict[str, Any]:
        """The engine alone, then the trainer."""
        found: dict[str, Any] = {"GiB used before": self.used()}
        self._launch(Engines.ONE)
        await asyncio.to_thread(self._write_checkpoint)
        found |= await self.start(Engines.ONE)
        found["GiB used with the engine"] = self.used()
        await self.start_trainer()
        return found | {"GiB used with the trainer": self.used()}

    def _pods(self, engines: Engines) -> list[LocalPod]:
        if self.cpu:
            return [LocalPod(self.work / "engine", self.boot, tp=1)]
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        return [_Stageless(self.work / "engine", self.boot, gpus=gpu, name="engine")]


class _Stageless(GpuPod):
    def _environment(self) -> dict[str, str]:
        return {**super()._environment(), pod.ENV_STAGE_MEDIUM: "None", pod.ENV_STAGE_GPUS: ""}


async def handed_over(bench: OneGpu, bucket_bytes: int | None, mode: PauseMode, of: str = "") -> dict[str, Any]:
    """One move from the order to serving. bucket_bytes: None is what the client chooses by itself."""
    assert bench.trainer is not None
    of, label = of or bench.other(), bench.label()
    await bench.begin_alike()
    bench.trainer.order(mode="colocated", version=label, of=of, bucket_bytes=bucket_bytes)
    said = await bench.trainer.said("serving", label)
    begin = time.monotonic()
    report = await bench.make(bench.move(label, Step.CONTINUE, SourceKind.COLOCATED, pause_mode=mode))
    end = time.monotonic()
    bench.trainer.order(mode="over", version=label)
    sent = await bench.trainer.done(label)
    assert report.move is not None
    row: dict[str, Any] = {
        "bucket MiB": "default" if bucket_bytes is None else bucket_bytes / MIB,
        "mode": str(mode),
        "error": report.move.error or sent.get("error", ""),
    }
    if row["error"]:
        return row
    bench.serves = of
    seen = await asyncio.to_thread(bench.streams.around, begin, end)
    return row | {
        "pause to continue, ms": round(report.move.stall_seconds * 1e3, 1),
        "looked at by the trainer, s": said["looked at in"],
        "order to serving, s": round(end - begin, 4),
        "decode lost, ms": round(seen.lost * 1e3, 1),
        "longest token gap, ms": round(seen.gap * 1e3, 1),
        "GiB used after": bench.used(),
    }


async def all_sizes(bench: OneGpu, sizes: Sequence[int | None], repeats: int) -> list[dict[str, Any]]:
    rows = []
    for size in sizes:
        for _ in range(repeats):
            for mode in MODES:
                rows.append(await handed_over(bench, size, mode))
                print(json.dumps(rows[-1]), flush=True)
    return rows


async def checked(bench: OneGpu, size: int) -> dict[str, Any]:
    """The version that the engine loaded from disk at first, by SGLang's own checksum."""
    row = await handed_over(bench, size, PauseMode.RETRACT, "v1")
    return row | {"checksum as loaded from disk": await bench.checksums(bench.pod) == bench.from_disk}


async def trainer_ended(bench: OneGpu) -> dict[str, Any]:
    """Whatever the engine still had mapped of the trainer's memory would outlast it."""
    assert bench.trainer is not None
    found: dict[str, Any] = {"GiB used before": bench.used()}
    bench.trainer.kill()
    await asyncio.sleep(GIVEN_BACK_SECONDS)
    return found | {"GiB used after": bench.used()}


def default_bucket() -> dict[str, Any]:
    """What the client would choose now for tensors of this GPU."""
    import torch

    from sglang_rollout.transfer.outgoing import bucket_bytes_for

    free = torch.cuda.mem_get_info()[0]
    return {"free, GiB": round(free / 2**30, 1), "MiB": bucket_bytes_for(torch.zeros(1, device="cuda")) / MIB}


async def run(given: argparse.Namespace) -> int:
    given.out.mkdir(parents=True, exist_ok=True)
    given.work.mkdir(parents=True, exist_ok=True)
    results = Results(given.out, given.seconds)
    bench = OneGpu(given.work, given.out, shape=given.shape, cpu=given.cpu, streams=given.streams)
    whole = (bench.size // MIB + 64) * MIB
    sizes = [None, 2048 * MIB, whole] if not given.cpu else [None, MIB // 4]
    step, repeats = results.step, given.repeats
    try:
        if await step("start", bench.begin, 150.0, 300.0):
            if not given.cpu:
                await step("default bucket", partial(asyncio.to_thread, default_bucket), 2.0)
            await step("first", partial(handed_over, bench, sizes[-1], MODES[0]), 10.0)
            await step("handed over", partial(all_sizes, bench, sizes, repeats), 10.0 * len(sizes) * repeats)
            await step("checksum", partial(checked, bench, whole), 15.0)
            await step("trainer ended", partial(trainer_ended, bench), 3.0)
    finally:
        await bench.stop()
        shutil.rmtree(given.work, ignore_errors=True)
    print("failed: " + (", ".join(results.failed) or "nothing"))
    return 1 if results.failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.colocated", description=__doc__)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--cpu", action="store_true", help="a dry run: by value, on the e2e tests' SGLang")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=420.0, help="for all of it")
    parser.add_argument("--work", type=Path, default=Path("/dev/shm/sglang-rollout-colocated"))
    parser.add_argument("--out", type=Path, default=Path("out/colocated"))
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
