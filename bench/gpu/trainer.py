"""python -m bench.gpu.trainer JSON: a trainer's process, by the shipped client's sending side. Holds two versions of a
model and sends what its standard input orders, one line of JSON each; answers with lines of JSON. Times are those of
time.monotonic(), which all processes share."""

from __future__ import annotations

import concurrent.futures
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from sglang_rollout.client.live import live_job
from sglang_rollout.client.room import SenderRoom
from sglang_rollout.transfer.outgoing import TensorBucket, buckets_of
from sglang_rollout.transfer.sender import Sending, send

from .models import Values, tensors, total_bytes

HOST = "127.0.0.1"
SECONDS = 120.0


def say(words: dict[str, Any]) -> None:
    print(json.dumps(words), flush=True)


class Trainer:
    def __init__(self, shape: str, device: str) -> None:
        self._held = {
            version: dict(_made(shape, Values(seed, device, total_bytes(shape)), device))
            for version, seed in (("v1", 1), ("v2", 2))
        }
        self._room = SenderRoom()
        self._live: dict[str, tuple[concurrent.futures.Future[Any], threading.Event]] = {}

    def run(self) -> None:
        say({"port": self._room.open(HOST, 0)})
        for line in sys.stdin:
            order = json.loads(line)
            if order["mode"] == "over":
                self._live[order["version"]][1].set()
            else:
                threading.Thread(target=self._obey, args=(order,), daemon=True).start()

    def _obey(self, order: dict[str, Any]) -> None:
        try:
            answer = self._send(order) if order["mode"] == "staged" else self._give(order)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        say({"done": order["version"], "at": time.monotonic(), **answer})

    def _send(self, order: dict[str, Any]) -> dict[str, Any]:
        feed = self._room.feed()
        sending = Sending(order["version"], order.get("timeout", SECONDS))
        keeper = self._room.keeper(order["transport"], HOST)
        future = self._room.start(send(self._room.reception, keeper, sending, feed.stream()))
        say({"sending": order["version"]})
        feed.give(self._buckets(order), [future])
        report = future.result()
        return {
            "root": report.root,
            "size": report.size,
            "transport": report.transport,
            "seconds": report.seconds,
            "lost": {one.receiver: one.reason for one in report.deliveries if one.reason},
        }

    def _buckets(self, order: dict[str, Any]) -> Iterator[TensorBucket]:
        for number, bucket in enumerate(buckets_of(self._held[order["of"]].items(), order["bucket_bytes"])):
            if number == order.get("die_at"):
                os.kill(os.getpid(), signal.SIGKILL)
            if number == order.get("tell_at"):
                say({"at bucket": number})
            yield bucket

    def _give(self, order: dict[str, Any]) -> dict[str, Any]:
        """Into the paused engine, until somebody says that it is over."""
        version, over = order["version"], threading.Event()
        begin = time.monotonic()
        job = live_job(
            self._room,
            version,
            self._held[order["of"]],
            colocated=order["mode"] == "colocated",
            bucket_bytes=order["bucket_bytes"],
            host=HOST,
            timeout=SECONDS,
        )
        serving = self._room.start(job)
        self._live[version] = (serving, over)
        say({"serving": version, "looked at in": round(time.monotonic() - begin, 2)})
        while not over.wait(0.1) and not serving.done():
            pass
        serving.cancel()
        return {}


def _made(shape: str, values: Values, device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Put together where they stay, which takes seconds less for many gigabytes."""
    pool = torch.frombuffer(values.pool, dtype=torch.uint8).to(device)
    for tensor in tensors(shape):
        flat = torch.cat([pool[span] for span in values.spans(tensor)])
        yield tensor.name, flat.view(torch.bfloat16).view(tensor.shape)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    given = json.loads(sys.argv[1])
    Trainer(given["shape"], given["device"]).run()
    os._exit(0)
