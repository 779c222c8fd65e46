"""Reads a checkpoint into the stage, in the background, with every byte checked on the way."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from .checkpoint_files import CheckpointUnusable, StoredTensor, stored_tensors
from .comparison import differences
from .manifest import Bucket, Manifest, Tensor, plan_buckets
from .stage import BytesRefused, Stage, StageWriter

BUCKET_BYTES = 256 << 20
READ_BYTES = 8 << 20  # between looks at whether to stop
THREADS = 4
NICENESS = 10


class StagingStopped(Exception):
    """Told to stop; the slot holds nothing."""


@dataclass(frozen=True)
class Reading:
    """What to read and how. `reference` is what the running model has, to be equal to (tied_names aside);
    `progress` gets bytes read and bytes in all, from any thread; `counted` the number of values that are Inf or NaN."""

    folder: Path
    version: str
    algorithm: str
    reference: Mapping[str, Tensor] | None = None
    tied_names: frozenset[str] = frozenset()
    bucket_bytes: int = BUCKET_BYTES
    threads: int = THREADS
    allow_nonfinite: bool = False
    progress: Callable[[int, int], None] = lambda done, of: None
    counted: Callable[[int], None] = lambda nonfinite: None
    stopped: Callable[[], bool] = lambda: False


def stage_checkpoint(stage: Stage, slot: str, reading: Reading) -> Manifest:
    """Blocks for as long as reading takes: call it from a thread. Raises CheckpointUnusable, BytesRefused,
    StageUnusable, ManifestRefused, StagingStopped, OSError; after any of them the slot holds nothing."""
    stored = stored_tensors(reading.folder)
    offered = {name: one.tensor for name, one in stored.items()}
    if reading.reference is not None:
        wrong = differences(
            offered, reading.reference, optional=reading.tied_names, subject=f"the tensors of {reading.folder}"
        )
        if wrong:
            raise BytesRefused("; ".join(wrong))
    buckets = list(plan_buckets(offered.values(), reading.bucket_bytes))
    writer = stage.write(slot, reading.algorithm, allow_nonfinite=reading.allow_nonfinite)
    _fill(writer, buckets, stored, reading)
    reading.counted(sum(writer.nonfinite.values()))
    return writer.seal(reading.version)


def _fill(writer: StageWriter, buckets: list[Bucket], stored: Mapping[str, StoredTensor], reading: Reading) -> None:
    total = sum(bucket.size for bucket in buckets)
    done = 0
    lock = threading.Lock()
    failed = threading.Event()

    def read(number: int, bucket: Bucket) -> None:
        nonlocal done
        with writer.fill(number) as view:
            for tensor, offset in bucket.placed():
                one = stored[tensor.name]
                for begin in range(0, tensor.size, READ_BYTES):
                    if failed.is_set() or reading.stopped():
                        raise StagingStopped(f"staging of {reading.version} was stopped")
                    size = min(READ_BYTES, tensor.size - begin)
                    _read_exactly(one, begin, view[offset + begin : offset + begin + size])
        with lock:
            done += bucket.size
            reading.progress(done, total)

    numbers = [writer.place(bucket) for bucket in buckets]
    with ThreadPoolExecutor(reading.threads, "stage", _step_back) as pool:
        tasks = [pool.submit(read, number, bucket) for number, bucket in zip(numbers, buckets, strict=True)]
        finished, waiting = wait(tasks, return_when=FIRST_EXCEPTION)
        if any(task.exception() for task in finished):
            failed.set()
            for task in waiting:
                task.cancel()
    errors = [task.exception() for task in tasks if not task.cancelled() and task.exception()]
    # The first real failure, rather than the stops that it caused.
    for error in sorted(errors, key=lambda error: isinstance(error, StagingStopped)):
        assert error is not None
        raise error


def _step_back() -> None:
    """Linux: this thread runs after the engine's, whose next step is worth more than an earlier stage."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _read_exactly(stored: StoredTensor, begin: int, into: memoryview) -> None:
    # Opened for each piece: a descriptor costs microseconds, a piece milliseconds.
    descriptor = os.open(stored.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        position = stored.begin + begin
        while len(into):
            count = os.preadv(descriptor, [into], position)
            if count == 0:
                raise CheckpointUnusable(f"{stored.path} was cut off while tensor {stored.tensor.name} was read")
            into = into[count:]
            position += count
    finally:
        os.close(descriptor)
