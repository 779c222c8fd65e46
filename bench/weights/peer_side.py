"""python -m bench.weights.peer_side give FOLDER SIZE BUCKET: a stage that other agents may read, and the same bytes on
a bare socket; prints where. `take FOLDER SIZE AGENT BARE ROOT`: for each line of standard input, both in turn."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import struct
import sys
import time
from pathlib import Path

import aiohttp
import numpy as np
from aiohttp import web

from sglang_rollout.agent.stage_door import StageDoor
from sglang_rollout.transfer.digests import ALGORITHMS
from sglang_rollout.transfer.manifest import Manifest, Tensor, plan_buckets
from sglang_rollout.transfer.peer_pull import pull
from sglang_rollout.transfer.stage import Stage, reserve_host

from .model import shapes

KEY = "bench"
SECONDS = 120.0
FINITE = 0xBF7F  # the bits of bfloat16 that are at most 1 whatever they are
SPARE = 1 << 20
HEAD = struct.Struct("!d")  # the giver's seconds of a processor so far
BYTES, NONE = b"b", b"n"


async def give(folder: Path, size: int, bucket_bytes: int) -> None:
    listed = [Tensor(name, "BF16", shape) for name, shape in shapes(size).items()]
    stage = reserve_host(folder, sum(tensor.size for tensor in listed) + SPARE, 1)
    manifest = _filled(stage, listed, bucket_bytes)
    app = web.Application()
    StageDoor(lambda: stage, lambda: KEY).serve(app)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    with socket.create_server(("127.0.0.1", 0)) as bare:
        where = {"agent": runner.addresses[0][1], "bare": bare.getsockname()[1], "root": manifest.root}
        print(json.dumps({**where, "size": manifest.size}), flush=True)
        await asyncio.to_thread(_give_bare, bare, stage, manifest.size)


def _filled(stage: Stage, listed: list[Tensor], bucket_bytes: int) -> Manifest:
    generator = np.random.default_rng(1)
    writer = stage.write("a", next(iter(ALGORITHMS)))
    for bucket in plan_buckets(listed, bucket_bytes):
        with writer.fill(writer.place(bucket)) as view:
            values = generator.integers(0, 1 << 16, bucket.size // 2, np.uint16) & np.uint16(FINITE)
            np.frombuffer(view, np.uint16)[:] = values
    return writer.seal("1")


def _give_bare(server: socket.socket, stage: Stage, size: int) -> None:
    while True:
        reader, _ = server.accept()
        with reader, stage.regions(stage.slots[0])[0].look(0, size) as view:
            reader.settimeout(SECONDS)
            wanted = reader.recv(1)
            reader.sendall(HEAD.pack(_spent()))
            if wanted == BYTES:
                reader.sendall(view)


async def take(folder: Path, size: int, agent: int, bare: int, root: str) -> None:
    stage = reserve_host(folder, size + SPARE, 1)
    async with aiohttp.ClientSession() as session:
        for _ in sys.stdin:
            first, ours, without = _asked(bare), _Timed(), _Timed()
            with without:
                _take_bare(stage, size, bare)
            second = _asked(bare)
            with ours:
                await pull(session, [f"127.0.0.1:{agent}"], root, "1", KEY, stage, "a", lambda _, of: None, SECONDS)
            third = _asked(bare)
            found = {
                "ours": ours.seconds,
                "bare": without.seconds,
                "ours_spent": ours.spent + third - second,
                "bare_spent": without.spent + second - first,
            }
            print(json.dumps(found), flush=True)


def _asked(port: int) -> float:
    """What the giver has spent."""
    with socket.create_connection(("127.0.0.1", port), SECONDS) as connection:
        connection.sendall(NONE)
        return float(HEAD.unpack(connection.recv(HEAD.size, socket.MSG_WAITALL))[0])


def _take_bare(stage: Stage, size: int, port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), SECONDS) as connection:
        connection.sendall(BYTES)
        connection.recv(HEAD.size, socket.MSG_WAITALL)
        with stage.regions(stage.slots[0])[0].window(0, size) as view:
            filled = 0
            while filled < size:
                count = connection.recv_into(view[filled:])
                assert count, "the giver has ended"
                filled += count


class _Timed:
    """Seconds of the clock, and of a processor in this process."""

    def __init__(self) -> None:
        self.seconds = self.spent = 0.0

    def __enter__(self) -> None:
        self.seconds, self.spent = -time.monotonic(), -_spent()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.monotonic()
        self.spent += _spent()


def _spent() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    what, folder, *rest = sys.argv[1:]
    if what == "give":
        asyncio.run(give(Path(folder), int(rest[0]), int(rest[1])))
    else:
        asyncio.run(take(Path(folder), int(rest[0]), int(rest[1]), int(rest[2]), rest[3]))
