"""The agent that dies in the middle of a commit, with the engine paused: the next one finds it so, and ends it."""

from __future__ import annotations

import time
from typing import Any

from sglang_rollout.agent.fault_points import EXIT_CODE
from sglang_rollout.protocol.weights import PauseMode, Step

from .wire_bench import EXPECTING, VERSIONS, Bench, settled
from .wire_steps import committed

AGAIN_SECONDS = 60.0


async def agent_killed_in_commit(bench: Bench, point: str, size: int) -> dict[str, Any]:
    """point: a fault point within an apply. Brings in the version that the engine once loaded from disk itself, so that
    SGLang's checksum of then is the right one."""
    assert bench.trainer is not None
    wanted_version, other = VERSIONS
    if bench.serves == wanted_version:
        await committed(bench, "Auto", size, PauseMode.IN_PLACE, other)
    pod = bench.pod
    await pod.kill_agent()
    pod.faults = f"{point}=exit"
    pod.start_agent()
    await pod.put(pod.desired(**EXPECTING))
    await pod.serving()
    label = bench.label()
    words = {"mode": "staged", "version": label, "of": wanted_version, "transport": "Auto"}
    bench.trainer.order(**words, bucket_bytes=size)
    await bench.trainer.said("sending", label)
    wanted = bench.move(label, Step.CONTINUE)
    await pod.put(pod.desired(move=wanted, **EXPECTING))
    if await pod.agent_ended() != EXIT_CODE:
        raise RuntimeError(f"the agent did not end at {point}")
    ended = time.monotonic()
    pod.faults = ""
    pod.start_agent()  # its order is in its journal
    report = await pod.until(lambda found: settled(wanted, found), AGAIN_SECONDS)
    again = time.monotonic() - ended
    await bench.trainer.done(label)
    assert report.move is not None
    bench.serves = wanted_version
    return {
        "error": report.move.error,
        "from its end to the engine serving, s": round(again, 2),
        "label": report.engine.weight_version == label,
        "checksum as loaded from disk": await bench.checksums(pod) == bench.from_disk,
    }
