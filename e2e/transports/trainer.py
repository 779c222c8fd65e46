"""A trainer as a process of its own, on the interpreter that has torch: sends what its standard input orders, one line
of JSON each, and answers with one line each. Lives on after every failure, which is what the tests look at."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import torch

from sglang_rollout.transfer.groups import GroupKeeper
from sglang_rollout.transfer.outgoing import TensorBucket, buckets_of
from sglang_rollout.transfer.reception import Reception
from sglang_rollout.transfer.sender import Sending, send
from sglang_rollout.transfer.transports.available import sender_transports


def tensors(order: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """As ordered: [name, dtype, shape, value] each."""
    for name, dtype, shape, value in order["tensors"]:
        yield name, torch.full(shape, value, dtype=getattr(torch, dtype))


async def work(reception: Reception, keeper: GroupKeeper, order: dict[str, Any]) -> dict[str, Any]:
    async def outgoing() -> AsyncIterator[TensorBucket]:
        for index, bucket in enumerate(buckets_of(tensors(order), order.get("bucket_bytes", 1 << 20))):
            if index == order.get("stall_at"):
                await asyncio.sleep(order["stall_seconds"])
            if index == order.get("lie_at"):
                bucket.bucket = type(bucket.bucket)(bucket.bucket.tensors, "0" * 32)
            yield bucket
            say({"sent": index})

    begin = time.monotonic()
    try:
        sending = Sending(order["version"], order.get("timeout", 30), order.get("join", 10))
        job = asyncio.create_task(send(reception, keeper, sending, outgoing()))
        await asyncio.sleep(0)
        say({"expects": order["version"]})  # an agent that came sooner would be turned away
        report = await job
        return {
            "root": report.root,
            "size": report.size,
            "transport": report.transport,
            "seconds": report.seconds,
            "lost": {one.receiver: one.reason for one in report.deliveries if one.reason},
        }
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - begin}


def say(words: dict[str, Any]) -> None:
    print(json.dumps(words), flush=True)


async def main() -> None:
    torch.set_num_threads(1)
    reception, keeper = Reception(), GroupKeeper(sender_transports())
    await reception.open("127.0.0.1", 0)
    say({"port": reception.port})
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        say({"done": await work(reception, keeper, json.loads(line)), "threads": threading.active_count()})


if __name__ == "__main__":
    asyncio.run(main())
