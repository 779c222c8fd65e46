"""What is made before anything is measured: checkpoints of two versions, staged on the host and on the GPU."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_rollout.transfer.cuda_driver import CudaDriver
from sglang_rollout.transfer.digests import ALGORITHMS
from sglang_rollout.transfer.disk_reader import BUCKET_BYTES, Reading, stage_checkpoint
from sglang_rollout.transfer.manifest import Manifest, plan_buckets
from sglang_rollout.transfer.stage import Stage, reserve_host
from sglang_rollout.transfer.stage_index import ALIGNMENT

from .models import tensors, write_folder, write_weights
from .settings import Settings

VERSIONS = ("v1", "v2")
HOLDER_SECONDS = 60
Facts = dict[str, Any]


@dataclass(frozen=True)
class Prepared:
    """`roots` by version; equal on host and GPU, since the same bytes are staged."""

    roots: dict[str, str]
    size: int
    host: Stage


def slot_size(settings: Settings) -> int:
    """For one version, with what alignment takes."""
    buckets = list(plan_buckets(tensors(settings.shape), BUCKET_BYTES))
    return sum(bucket.size + ALIGNMENT for bucket in buckets)


def algorithm() -> str:
    return next(iter(ALGORITHMS))


def checkpoint(settings: Settings, version: str) -> Path:
    return settings.work / version


def make_folders(settings: Settings) -> None:
    settings.out.mkdir(parents=True, exist_ok=True)
    for version in VERSIONS:
        checkpoint(settings, version).mkdir(parents=True, exist_ok=True)
        write_folder(checkpoint(settings, version), settings.shape)
    for medium in ("host", "device"):
        (settings.work / medium).mkdir(exist_ok=True)
    use_medium(settings, "host")


def use_medium(settings: Settings, medium: str) -> None:
    """The engine looks for its stage in one place: this decides which one is there."""
    link = settings.work / "stage.new"
    link.unlink(missing_ok=True)
    link.symlink_to(settings.work / medium)
    link.replace(settings.work / "stage")


@contextmanager
def device_holder(settings: Settings, facts: Facts) -> Iterator[subprocess.Popen[bytes] | None]:
    """GPU memory for two versions, in a process of its own; None on a CPU."""
    if settings.cpu:
        yield None
        return
    import torch

    before = torch.cuda.mem_get_info()[0]
    argv = [sys.executable, "-m", "sglang_rollout.transfer.device_holder", "--folder", str(settings.work / "device")]
    argv += ["--slots", "2", "--bytes", str(slot_size(settings))]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            if process.stdout.readline().strip() != b"ready":
                raise RuntimeError("the holder of GPU memory did not start")
            used = before - torch.cuda.mem_get_info()[0]
            facts["holder: GPU memory beside the staged bytes, GiB"] = round(
                (used - 2 * slot_size(settings)) / 2**30, 2
            )
            yield process
        finally:
            process.kill()


def prepare(settings: Settings, facts: Facts) -> Prepared:
    roots: dict[str, str] = {}
    size = 0
    device = "cpu" if settings.cpu else "cuda"
    for number, version in enumerate(VERSIONS):
        begin = time.monotonic()
        size = write_weights(checkpoint(settings, version), settings.shape, number + 1, device)
        facts[f"write checkpoint {version}, s"] = round(time.monotonic() - begin, 2)
    begin = time.monotonic()
    host = reserve_host(settings.work / "host", slot_size(settings), 2)
    facts["reserve 2 host slots, s"] = round(time.monotonic() - begin, 2)
    stages = [("host", host)]
    if not settings.cpu:
        stages.append(("device", Stage(settings.work / "device", CudaDriver())))
    for medium, stage in stages:
        for slot, version in zip(("a", "b"), VERSIONS, strict=True):
            begin = time.monotonic()
            manifest = read_into(settings, stage, slot, version)
            facts[f"read {version} into the {medium} stage (engine starting), s"] = round(time.monotonic() - begin, 2)
            if roots.setdefault(version, manifest.root) != manifest.root:
                raise RuntimeError(f"{version} has another digest on the {medium} than on the host")
    if not settings.cpu:
        import torch

        torch.cuda.empty_cache()
    facts["bytes"], facts["digest"] = size, algorithm()
    return Prepared(roots, size, host)


def read_into(settings: Settings, stage: Stage, slot: str, version: str) -> Manifest:
    reading = Reading(checkpoint(settings, version), version, algorithm(), threads=settings.threads)
    return stage_checkpoint(stage, slot, reading)
