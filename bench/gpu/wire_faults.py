"""Processes that die while weights are on the wire: how soon it is noticed, and that the next transfer works."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

from sglang_rollout.protocol.weights import Step

from .pods import intake_of
from .wire_bench import EXPECTING, Bench, settled
from .wire_steps import transfer

GIVEN_UP_SECONDS = 30.0  # by a sender whose agent has gone


async def receiver_killed(bench: Bench, transport: str, size: int) -> dict[str, Any]:
    """The process that receives for the agent."""
    assert bench.trainer is not None
    receiver = await asyncio.to_thread(intake_of, bench.pod.stage_folder)  # which takes longer than half a transfer
    label, middle = await _begin(bench, transport, size, "tell_at")
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
    label, middle = await _begin(bench, transport, size, "tell_at")
    wanted = bench.move(label, Step.PREPARE, transport=transport)
    await bench.pod.put(bench.pod.desired(move=wanted, **EXPECTING))
    await bench.trainer.said("at bucket", middle)
    await bench.pod.kill_agent()
    killed = time.monotonic()
    bench.pod.start_agent()
    sent = await bench.trainer.done(label)
    await bench.pod.put(bench.pod.desired(**EXPECTING))
    await bench.pod.serving()
    back = time.monotonic() - killed
    return {
        "the sender says": sent.get("error") or sent.get("lost"),
        "noticed by the sender, s": round(sent["at"] - killed, 3),
        "a new agent reports, s": round(back, 2),
        **await _recovered(bench, transport, size, killed),
    }


async def sender_killed(bench: Bench, transport: str, size: int) -> dict[str, Any]:
    """The trainer itself. It starts again, which takes most of the time until the next transfer."""
    assert bench.trainer is not None
    label, _ = await _begin(bench, transport, size, "die_at")
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


async def _begin(bench: Bench, transport: str, size: int, what: str) -> tuple[str, int]:
    """Orders a sending that does `what` at its middle bucket. Its label, and that bucket's number."""
    assert bench.trainer is not None
    label, middle = bench.label(), max(1, bench.size // size // 2)
    order = {"mode": "staged", "version": label, "of": bench.other(), "transport": transport, "bucket_bytes": size}
    bench.trainer.order(**order, **{what: middle}, timeout=GIVEN_UP_SECONDS)
    await bench.trainer.said("sending", label)
    return label, middle


async def _recovered(bench: Bench, transport: str, size: int, killed: float) -> dict[str, Any]:
    row = await transfer(bench, transport, size)
    return {"the next transfer": row, "staged again after the kill, s": round(time.monotonic() - killed, 2)}
