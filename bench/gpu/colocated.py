"""python -m bench.gpu.colocated: a trainer and an engine with the shipped agent on one GPU, weights handed over by CUDA
IPC while the engine is paused. Writes wire.json into --out after every step, and logs.tar.xz at the end."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from e2e.agent.local_pod import LocalPod
from sglang_rollout.protocol import pod
from sglang_rollout.protocol.weights import PauseMode, SourceKind, Step

from .memory import used_gibibytes
from .pods import GpuPod
from .stepwise import Results, running, until_signalled
from .wire_bench import Bench, Engines

MIB = 1 << 20
MODES = (PauseMode.RETRACT, PauseMode.IN_PLACE)
CPU_BUCKET_BYTES = MIB // 4  # of the tiny shape
REPEAT_SECONDS = 7.0  # for all modes once
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


async def several(bench: OneGpu, size: int | None, repeats: int) -> list[dict[str, Any]]:
    """In each of the modes in turn."""
    rows = []
    for _ in range(repeats):
        for mode in MODES:
            rows.append(await handed_over(bench, size, mode))
            print(json.dumps(rows[-1]), flush=True)
    return rows


async def checked(bench: OneGpu, size: int | None) -> dict[str, Any]:
    """The version that the engine loaded from disk at first, by SGLang's own checksum."""
    row = await handed_over(bench, size, PauseMode.RETRACT, "v1")
    return row | {"checksum as loaded from disk": await bench.checksums(bench.pod) == bench.from_disk}


async def trainer_ended(bench: OneGpu) -> dict[str, Any]:
    """Whatever the engine still had mapped of the trainer's memory would outlast it."""
    assert bench.trainer is not None
    found: dict[str, Any] = {"GiB used before": bench.used()}
    await bench.trainer.kill()
    await asyncio.sleep(GIVEN_BACK_SECONDS)
    return found | {"GiB used after": bench.used()}


async def run(given: argparse.Namespace) -> int:
    bench = OneGpu(given.work, shape=given.shape, cpu=given.cpu, streams=given.streams)
    async with running(bench, given.out, given.seconds) as results:
        if await results.step("start", bench.begin, 90.0, 300.0):
            await measure(bench, results, given.repeats)
    return results.exit_code()


async def measure(bench: OneGpu, results: Results, repeats: int) -> None:
    """A step for each size of buckets. What a run that is cut short should tell comes first."""
    step = results.step
    await step("first", partial(handed_over, bench, None, MODES[0]), 6.0)
    await step("as the client chooses", partial(several, bench, None, repeats), REPEAT_SECONDS * repeats)
    await step("checksum", partial(checked, bench, None), 10.0)
    for size in (2048 * MIB, 1024 * MIB) if not bench.cpu else (CPU_BUCKET_BYTES,):
        await step(f"buckets of {size / MIB:g} MiB", partial(several, bench, size, repeats), REPEAT_SECONDS * repeats)
    await step("trainer ended", partial(trainer_ended, bench), 3.0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.colocated", description=__doc__)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--cpu", action="store_true", help="a dry run: by value, on the e2e tests' SGLang")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=420.0, help="for all of it")
    parser.add_argument("--work", type=Path, default=Path("/dev/shm/sglang-rollout-colocated"))
    parser.add_argument("--out", type=Path, default=Path("out/colocated"))
    return until_signalled(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
