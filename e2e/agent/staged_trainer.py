"""A trainer for tests, run by the engine's Python, which has torch: sends a checkpoint's tensors to the agents' stages.
Its argument is the JSON of {label: folder}; it prints for each label, in
order, "port N" when agents may come, and "done {...}"."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import torch
from safetensors.torch import load_file

from sglang_rollout.transfer.groups import GroupKeeper
from sglang_rollout.transfer.outgoing import TensorBucket, buckets_of
from sglang_rollout.transfer.reception import Reception
from sglang_rollout.transfer.sender import Sending, send
from sglang_rollout.transfer.transports.available import sender_transports

BUCKET_BYTES = 100_000
SECONDS = 300.0  # a receiving process that starts on a busy machine takes a minute


def tensors_of(folder: str, fault: str) -> dict[str, torch.Tensor]:
    held = {name: t for path in sorted(Path(folder).glob("*.safetensors")) for name, t in load_file(path).items()}
    name = next(name for name in held if name.endswith("k_proj.weight"))
    if fault == "shape":
        held[name] = held[name][:, ::2].contiguous()
    elif fault == "missing":
        del held[name]
    elif fault == "nan":
        held[name][0, 0] = float("nan")
    return held


async def outgoing(tensors: dict[str, torch.Tensor], fault: str) -> AsyncIterator[TensorBucket]:
    for number, bucket in enumerate(buckets_of(iter(tensors.items()), BUCKET_BYTES)):
        if fault == "exit" and number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        yield bucket


async def main() -> None:
    versions: dict[str, str] = json.loads(sys.argv[1])
    fault = sys.argv[2] if len(sys.argv) > 2 else ""
    torch.set_num_threads(1)
    reception, keeper = Reception(), GroupKeeper(sender_transports())
    await reception.open("127.0.0.1", 0)
    for label, folder in versions.items():
        tensors = tensors_of(folder, fault)
        sending = asyncio.create_task(send(reception, keeper, Sending(label, SECONDS), outgoing(tensors, fault)))
        await asyncio.sleep(0)  # until then agents that ask for it are refused
        print(f"port {reception.port}", flush=True)
        try:
            report = await sending
            print(f"done {json.dumps({'root': report.root})}", flush=True)
        except Exception as error:
            print(f"done {json.dumps({'error': str(error)})}", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
