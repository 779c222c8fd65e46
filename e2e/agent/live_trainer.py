"""A trainer for tests, run by the engine's Python, which has torch: gives a checkpoint's tensors to paused engines. Its
one argument is the JSON of Orders; for each version it prints "port N" when agents may come, and "done {...}" when it
has served as long as it was told."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from sglang_rollout.transfer.giving import EngineGroups, Giving, HandingOver
from sglang_rollout.transfer.link import Link
from sglang_rollout.transfer.live_sender import LiveSender, LiveSending, WrongForEngine
from sglang_rollout.transfer.live_weights import LiveWeights
from sglang_rollout.transfer.reception import Reception
from sglang_rollout.transfer.session import Hello


@dataclass(frozen=True)
class Orders:
    """versions: label to folder, served one after the other, the next when standard input has a line. fault: what goes
    wrong with the tensors ("shape", "dtype", "missing", "unknown", "nan", "first changed", "last changed"), or
    "<what>@<step>": the process does `exit`, `stop` (SIGSTOP) or `hang` at the step join, prepare or give of the second
    bucket."""

    versions: dict[str, str]
    mode: str
    bucket_bytes: int = 100_000
    fault: str = ""
    seconds: float = 60.0


def tensors_of(folder: str, fault: str) -> dict[str, torch.Tensor]:
    held = {name: t for path in sorted(Path(folder).glob("*.safetensors")) for name, t in load_file(path).items()}
    name = next(name for name in held if name.endswith("k_proj.weight"))
    if fault == "shape":
        held[name] = held[name][:, ::2].contiguous()
    elif fault == "dtype":
        held[name] = held[name].float()
    elif fault == "missing":
        del held[name]
    elif fault == "unknown":
        held["model.layers.0.extra"] = held[name]
    elif fault == "nan":
        held[name][0, 0] = float("nan")
    return held


class Faulty:
    """One engine's buckets, with a fault at a step."""

    def __init__(self, giving: Giving, fault: str) -> None:
        self.giving = giving
        self._what, _, self._step = fault.partition("@")
        self.transport, self.group = giving.transport, giving.group

    def __getattr__(self, name: str) -> Any:
        return getattr(self.giving, name)

    def join(self, seconds: float) -> None:
        self._at("join")
        self.giving.join(seconds)

    def prepare(self, number: int) -> tuple[dict[str, str], bytes]:
        self._at("prepare" if number == 1 else "")
        return self.giving.prepare(number)

    def give(self, number: int, seconds: float) -> None:
        self._at("give" if number == 1 else "")
        self.giving.give(number, seconds)

    def _at(self, step: str) -> None:
        if step != self._step:
            return
        if self._what == "exit":
            os._exit(9)
        if self._what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self._what == "hang":
            time.sleep(600)


async def serve(orders: Orders) -> None:
    reception = Reception()
    await reception.open("127.0.0.1", 0)
    groups = EngineGroups("127.0.0.1")
    for version, folder in orders.versions.items():
        tensors = tensors_of(folder, orders.fault)
        weights = LiveWeights(tensors, orders.bucket_bytes, _buffer)
        await asyncio.to_thread(weights.survey)
        if orders.fault.endswith(" changed"):
            list(tensors.values())[0 if orders.fault.startswith("first") else -1].add_(1.0)

        def opened(link: Link, hello: Hello, weights: LiveWeights = weights) -> Faulty:
            if orders.mode == "direct":
                return Faulty(groups.open(weights, link, hello), orders.fault)
            return Faulty(HandingOver(weights, hello.ranks), orders.fault)

        def closed(hello: Hello, giving: Any, good: bool) -> None:
            if orders.mode == "direct":
                groups.keep(hello, giving.giving, good)

        sending = LiveSending(version, orders.mode, weights, opened, closed, orders.seconds)
        sender = LiveSender(sending)
        serving = asyncio.create_task(sender.serve(reception))
        await asyncio.sleep(0)  # it expects agents now
        print("port", reception.port, flush=True)
        told = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
        await asyncio.wait({serving, told}, return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()
        wrong = ""
        try:
            await serving
        except WrongForEngine as error:
            wrong = str(error)
        except asyncio.CancelledError:
            pass
        print(
            "done",
            json.dumps({"wrong": wrong, **{d.receiver: d.reason for d in sender.deliveries.values()}}),
            flush=True,
        )
    await reception.close()


def _buffer(size: int, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(serve(Orders(**json.loads(sys.argv[1]))))
    os._exit(0)
