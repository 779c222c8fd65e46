"""python -m bench.weights.bare RANK WORLD PORT BUCKET COUNT REST: one rank of a bare Gloo broadcast of COUNT buckets of
BUCKET bytes and one of REST, as often as standard input has a line. Rank 0 prints the seconds until all have them."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as distributed

DEADLINE = timedelta(seconds=120)


def main() -> None:
    torch.set_num_threads(1)
    rank, world, port, bucket, count, rest = (int(word) for word in sys.argv[1:])
    store = distributed.TCPStore("127.0.0.1", port, world, rank == 0, DEADLINE)
    options = distributed.ProcessGroupGloo._Options()
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = DEADLINE
    group = distributed.ProcessGroupGloo(store, rank, world, options)
    whole = torch.ones(bucket * count + rest, dtype=torch.uint8)
    pieces = [whole[n * bucket : (n + 1) * bucket] for n in range(count)] + ([whole[-rest:]] if rest else [])
    from_first = distributed.BroadcastOptions()
    from_first.rootRank, from_first.rootTensor = 0, 0
    for _ in sys.stdin if rank == 0 else iter(int, 1):
        begun = torch.zeros(1)
        group.broadcast([begun], from_first).wait()
        begin = time.monotonic()
        for piece in pieces:
            group.broadcast([piece], from_first).wait()
        group.barrier().wait()
        if rank == 0:
            print(time.monotonic() - begin, flush=True)


if __name__ == "__main__":
    main()
