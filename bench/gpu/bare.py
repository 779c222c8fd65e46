"""python -m bench.gpu.bare: what two GPUs of this machine can do without us: broadcasts of buckets by NCCL, and copies
by the copy engine. Prints one line of JSON."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from typing import Any

import torch
import torch.distributed as distributed
import torch.multiprocessing

SIZES_MIB = (64, 256, 512, 2048, 4096)
TOTAL_MIB = 8192
PAIR = 2


def main() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_rank, args=(port, sys.argv[1:]), nprocs=PAIR)


def _rank(rank: int, port: int, words: list[str]) -> None:
    cuda = "--cpu" not in words
    if cuda:
        torch.cuda.set_device(rank)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    distributed.init_process_group("nccl" if cuda else "gloo", rank=rank, world_size=PAIR)
    found: dict[str, Any] = {}
    sizes, total = (SIZES_MIB, TOTAL_MIB) if cuda else ((16, 64), 64)
    for mebibytes in sizes:
        buffer = torch.zeros(mebibytes << 20, dtype=torch.uint8, device=f"cuda:{rank}" if cuda else "cpu")
        best = 0.0
        for _ in range(3):  # the first is a warm-up
            _ready(cuda)
            begin = time.perf_counter()
            count = max(1, total // mebibytes)
            for _ in range(count):
                distributed.broadcast(buffer, 0)
            _ready(cuda)
            best = max(best, count * buffer.numel() / 1e9 / (time.perf_counter() - begin))
        found[f"broadcast, {mebibytes} MiB, GB/s"] = round(best, 1)
        del buffer
    if rank == 0:
        if cuda:
            found["copy of 4 GiB, GB/s"] = round(_copy(), 1)
        print(json.dumps(found), flush=True)
    distributed.destroy_process_group()


def _copy() -> float:
    here = torch.zeros(4 << 30, dtype=torch.uint8, device="cuda:0")
    there = torch.zeros(4 << 30, dtype=torch.uint8, device="cuda:1")
    best = 0.0
    for _ in range(3):
        torch.cuda.synchronize(0)
        begin = time.perf_counter()
        there.copy_(here)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        best = max(best, here.numel() / 1e9 / (time.perf_counter() - begin))
    return best


def _ready(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()
    distributed.barrier()


if __name__ == "__main__":
    main()
