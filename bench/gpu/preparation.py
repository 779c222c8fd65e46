"""What is made before anything is measured: checkpoints of two versions, staged on the host and on the GPU."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_rollout.transfer.cuda_driver import CudaDriver
from sglang_rollout.transfer.digests import ALGORITHMS
from sglang_rollout.transfer.disk_reader import BUCKET_BYTES, Reading, stage_checkpoint
from sglang_rollout.transfer.manifest import Bucket, Manifest, plan_buckets
from sglang_rollout.transfer.stage import Stage, reserve_host
from sglang_rollout.transfer.stage_index import ALIGNMENT, SLOT_NAMES

from .models import Values, tensors, total_bytes, write_folder, write_weights
from .settings import Settings

VERSIONS = ("v1", "v2")
HOLDER_SECONDS = 60
Facts = dict[str, Any]


@dataclass(frozen=True)
class Prepared:
    """`roots` by version; equal on host and GPU, since the same bytes are staged. `held`: the versions of a medium."""

    roots: dict[str, str]
    size: int
    host: Stage
    held: dict[str, tuple[str, ...]]

    @property
    def media(self) -> tuple[str, ...]:
        return tuple(self.held)

    def versions(self, medium: str) -> tuple[str, ...]:
        return self.held[medium]


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
    argv += ["--slots", str(_slots(settings)), "--bytes", str(slot_size(settings))]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            if process.stdout.readline().strip() != b"ready":
                raise RuntimeError("the holder of GPU memory did not start")
            used = before - torch.cuda.mem_get_info()[0]
            facts["holder: GPU memory beside the staged bytes, GiB"] = round(
                (used - _slots(settings) * slot_size(settings)) / 2**30, 2
            )
            yield process
        finally:
            process.kill()


def prepare(settings: Settings, facts: Facts) -> Prepared:
    """Checkpoints of both versions and both of them in each medium; with `lean` one version in each, and no files."""
    size = total_bytes(settings.shape)
    facts["bytes"], facts["digest"] = size, algorithm()
    device = "cpu" if settings.cpu else "cuda"
    values = {version: Values(number + 1, device, size) for number, version in enumerate(VERSIONS)}
    if not settings.lean:
        for version in VERSIONS:
            with _noted(facts, f"write checkpoint {version}, s"):
                write_weights(checkpoint(settings, version), settings.shape, values[version], settings.threads)
    slots = _slots(settings)
    with _noted(facts, f"reserve {slots} host slots, s"):
        host = reserve_host(settings.work / "host", slot_size(settings), slots)
    stages = {} if settings.cpu else {"device": Stage(settings.work / "device", CudaDriver())}
    stages["host"] = host
    held = {
        medium: VERSIONS[number : number + 1] if settings.lean and len(stages) > 1 else VERSIONS[:slots]
        for number, medium in enumerate(stages)
    }
    # Media at once: copying to a GPU and filling host memory hardly meet.
    with ThreadPoolExecutor(len(stages)) as pool:
        found = [
            pool.submit(_stage_all, settings, facts, medium, stage, held[medium], values)
            for medium, stage in stages.items()
        ]
        roots: dict[str, str] = {}
        for (medium, _), one in zip(stages.items(), found, strict=True):
            for version, root in one.result().items():
                if roots.setdefault(version, root) != root:
                    raise RuntimeError(f"{version} has another digest on the {medium} than elsewhere")
    if not settings.cpu:
        import torch

        torch.cuda.empty_cache()
    return Prepared(roots, size, host, held)


def _stage_all(
    settings: Settings, facts: Facts, medium: str, stage: Stage, versions: Sequence[str], values: dict[str, Values]
) -> dict[str, str]:
    roots: dict[str, str] = {}
    for slot, version in zip(SLOT_NAMES, versions, strict=False):
        with _noted(facts, f"read {version} into the {medium} stage (engine starting), s"):
            if settings.lean:
                roots[version] = _fill(settings, stage, slot, version, values[version]).root
            else:
                roots[version] = read_into(settings, stage, slot, version).root
    return roots


def read_into(settings: Settings, stage: Stage, slot: str, version: str) -> Manifest:
    reading = Reading(checkpoint(settings, version), version, algorithm(), threads=settings.threads)
    return stage_checkpoint(stage, slot, reading)


def _fill(settings: Settings, stage: Stage, slot: str, version: str, values: Values) -> Manifest:
    writer = stage.write(slot, algorithm())
    buckets = list(plan_buckets(tensors(settings.shape), BUCKET_BYTES))
    numbers = [writer.place(bucket) for bucket in buckets]

    def fill(number: int, bucket: Bucket) -> None:
        with writer.fill(number) as view:
            for tensor, offset in bucket.placed():
                values.write_into(view[offset : offset + tensor.size], tensor)

    with ThreadPoolExecutor(settings.threads) as pool:
        list(pool.map(fill, numbers, buckets))
    return writer.seal(version)


def _slots(settings: Settings) -> int:
    return 1 if settings.lean else 2


@contextmanager
def _noted(facts: Facts, name: str) -> Iterator[None]:
    begin = time.monotonic()
    yield
    facts[name] = round(time.monotonic() - begin, 2)
