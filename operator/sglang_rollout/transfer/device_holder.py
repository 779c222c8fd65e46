"""python3 -m sglang_rollout.transfer.device_holder: owns the staged bytes in GPU memory and does nothing else, so that
they outlive the agent. Standard library only: a CUDA context is all that it costs.

Prints "ready" when the index is written, and ends when its standard input does."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .cuda_driver import CudaDriver, CudaError
from .stage_index import Region, device_index

CHUNK = 2 << 20  # what cuMemAlloc rounds up to


def main() -> int:
    parser = argparse.ArgumentParser(prog="device_holder")
    parser.add_argument("--folder", type=Path, required=True, help="where the index is written")
    parser.add_argument("--slots", type=int, choices=(1, 2), default=1)
    parser.add_argument("--bytes", type=int, required=True, help="of one slot on each GPU")
    parser.add_argument("--gpus", default="0", help="ordinals, separated by commas")
    given = parser.parse_args()
    size = -(-given.bytes // CHUNK) * CHUNK
    slots: list[list[Region]] = [[] for _ in range(given.slots)]
    try:
        for ordinal in (int(word) for word in given.gpus.split(",")):
            driver = CudaDriver(ordinal)
            for regions in slots:
                address = driver.allocate(size)
                regions.append(Region(size, gpu=driver.gpu, handle=driver.export(address)))
    except CudaError as error:
        print(f"no stage of {given.slots} x {size} bytes on each of GPUs {given.gpus}: {error}", file=sys.stderr)
        return 1
    device_index(given.folder, slots)
    print("ready", flush=True)
    sys.stdin.buffer.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())
