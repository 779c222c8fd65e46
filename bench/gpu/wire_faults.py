"""Processes that die while weights are on the wire: how soon it is noticed, and that the next transfer works."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

from sglang_rollout.protocol.weights import Step

from .pods import intake_of
from .wire_bench import PEER_KEY, Bench, settled
from .wire_steps import transfer


async def receiver_killed(bench: Bench, transport: str, size: int) -> dict[str, Any]:
    """The process that receives for the agent."""
    assert bench.trainer is not None
    receiver = await asyncio.to_thread(intake_of, bench.pod.stage_folder)  # which takes longer than half a transfer
    label, middle = bench.label(), _middle(bench, size)
    bench.trainer.order(
        mode="staged", version=label, of=bench.other(), transport=transport, bucket_bytes=size, tell_at=middle
    )
    await bench.trainer.said("sending", label)
    wanted = bench.move(label, Step.PREPARE, transport=transport)
    moving = asyncio.create_task(bench.make(wanted))
    await bench.trainer.said("at bucket", middle)
    os.kill(receiver, signal.SIGKILL)
    killed = time.monotonic()
    report = await moving
    noticed = time.monotonic() - killed
    sent = await bench.trainer.done(label)
    assert report.move is not None
    return {
        "the agent says": report.move.error,
        "noticed by the agent, s": round(noticed, 3),
        "the sender says": sent.get("error") or sent.get("lost"),
        "noticed by the sender, s": round(sent["at"] - killed, 3),
        **await _recovered(bench, transport, size, killed),
    }


async def agent_killed(bench: Bench, transport: str, size: int) -> dict[str, Any]:
    assert bench.trainer is not None
    label, middle = bench.label(), _middle(bench, size)
    bench.trainer.order(
        mode="staged", version=label, of=bench.other(), transport=transport, bucket_bytes=size, tell_at=middle
    )
    await bench.trainer.said("sending", label)
    wanted = bench.move(label, Step.PREPARE, transport=transport)
    await bench.pod.put(bench.pod.desired(move=wanted, peer_key=PEER_KEY))
    await bench.trainer.said("at bucket", middle)
    await bench.pod.kill_agent()
    killed = time.monotonic()
    sent = await bench.trainer.done(label)
    noticed = sent["at"] - killed
    bench.pod.start_agent()
    await bench.pod.put(bench.pod.desired(peer_key=PEER_KEY))
    await bench.pod.serving()
    back = time.monotonic() - killed
    return {
        "the sender says": sent.get("error") or sent.get("lost"),
        "noticed by the sender, s": round(noticed, 3),
        "a new agent reports, s": round(back, 2),
        **await _recovered(bench, transport, size, killed),
    }


async def sender_killed(bench: Bench, transport: str, size: int) -> dict[str, Any]:
    """The trainer itself. It starts again, which takes most of the time until the next transfer."""
    assert bench.trainer is not None
    label = bench.label()
    bench.trainer.order(
        mode="staged",
        version=label,
        of=bench.other(),
        transport=transport,
        bucket_bytes=size,
        die_at=_middle(bench, size),
    )
    await bench.trainer.said("sending", label)
    wanted = bench.move(label, Step.PREPARE, transport=transport)
    moving = asyncio.create_task(bench.make(wanted))
    await bench.trainer.said("ended")
    killed = time.monotonic()
    report = await moving
    noticed = time.monotonic() - killed
    assert report.move is not None
    await bench.start_trainer()
    return {
        "the agent says": report.move.error,
        "noticed by the agent, s": round(noticed, 3),
        "settled": settled(wanted, report),
        **await _recovered(bench, transport, size, killed),
    }


async def _recovered(bench: Bench, transport: str, size: int, killed: float) -> dict[str, Any]:
    row = await transfer(bench, transport, size)
    return {"the next transfer": row, "staged again after the kill, s": round(time.monotonic() - killed, 2)}


def _middle(bench: Bench, size: int) -> int:
    return max(1, bench.size // size // 2)
