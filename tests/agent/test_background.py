"""A preparation beside the agent's loop: what it writes to is not given away before it has ended, however often and by
whomever it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

from sglang_rollout.agent.background import Background, Prepared, Preparing, Progressed
from sglang_rollout.agent.staging import _in_thread
from sglang_rollout.protocol.weights import Source, WeightVersion
from sglang_rollout.transfer.manifest import Manifest

from .fake_pod import eventually


def begun(background: Background, seconds: float, work_seconds: float) -> list[float]:
    """The background reads for `work_seconds`, deaf as a thread is that waits for slow storage."""
    ended: list[float] = []
    stop = threading.Event()

    def read() -> Manifest:
        time.sleep(work_seconds)
        ended.append(time.monotonic())
        raise OSError("stopped")

    async def work(progress: Progressed) -> Prepared:
        return Prepared((await _in_thread(read, stop)).root)

    order = Preparing("m1", WeightVersion("2", "/v2"), Source(), "s1", time.monotonic())
    background.begin(order, work, seconds)
    return ended


async def ended_at(background: Background) -> float:
    await eventually(lambda: not background.running)
    return time.monotonic()


async def test_told_to_end_twice_it_is_under_way_until_nothing_writes_any_more() -> None:
    background = Background(time.monotonic, lambda: None)
    ended = begun(background, 60.0, 0.5)
    await asyncio.sleep(0.1)
    background.cancel()
    await asyncio.sleep(0.05)
    background.cancel()
    at = await ended_at(background)
    assert ended, "the slot is given away while a thread still writes to it"
    assert at >= ended[0]


async def test_told_to_end_when_its_time_is_over_it_is_under_way_until_nothing_writes_any_more() -> None:
    background = Background(time.monotonic, lambda: None)
    ended = begun(background, 0.1, 0.5)
    await asyncio.sleep(0.2)
    background.cancel()
    await ended_at(background)
    assert ended


async def test_what_is_late_says_so_at_once_and_is_under_way_until_nothing_writes_any_more() -> None:
    background = Background(time.monotonic, lambda: None)
    ended = begun(background, 0.1, 0.5)
    await asyncio.sleep(0.3)
    state = background.state
    assert state is not None
    assert (state.running, state.error, background.running) == (False, "not prepared within 0.1 s", True)
    await ended_at(background)
    assert ended


async def test_its_time_is_over_after_it_was_told_to_end() -> None:
    background = Background(time.monotonic, lambda: None)
    ended = begun(background, 0.2, 0.5)
    await asyncio.sleep(0.1)
    background.cancel()
    await ended_at(background)
    assert ended


async def test_closing_waits_for_it() -> None:
    background = Background(time.monotonic, lambda: None)
    ended = begun(background, 60.0, 0.3)
    await asyncio.sleep(0.05)
    background.cancel()
    await asyncio.sleep(0.05)
    with contextlib.suppress(asyncio.CancelledError):
        await background.close()
    assert ended
