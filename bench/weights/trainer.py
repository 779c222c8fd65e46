"""python -m bench.weights.trainer BYTES: holds a model and sends it when a line of JSON on standard input asks
for it."""

from __future__ import annotations

import json
import sys

import torch

from sglang_rollout.client.room import SenderRoom
from sglang_rollout.transfer.outgoing import buckets_of
from sglang_rollout.transfer.sender import Sending, send

from .model import tensors

HOST = "127.0.0.1"
SECONDS = 120.0


def main() -> None:
    torch.set_num_threads(1)
    held = tensors(int(sys.argv[1]))
    room = SenderRoom()
    print(json.dumps({"port": room.open(HOST, 0)}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        feed = room.feed()
        future = room.start(
            send(room.reception, room.keeper("Gloo", HOST), Sending(order["version"], SECONDS), feed.stream())
        )
        feed.give(buckets_of(held.items(), order["bucket_bytes"]), [future])
        report = future.result()
        print(json.dumps({"seconds": report.seconds, "size": report.size, "root": report.root}), flush=True)
    room.close()


if __name__ == "__main__":
    main()
