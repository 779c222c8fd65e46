"""Buckets that came into GPU memory are checked together, whatever waits for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from sglang_rollout.transfer.gpu_arrivals import GpuArrivals
from sglang_rollout.transfer.stage import BytesRefused


async def test_what_comes_during_a_check_is_checked_at_once() -> None:
    seen: list[list[int]] = []
    first, go_on = threading.Event(), threading.Event()

    def check(numbers: Sequence[int]) -> None:
        seen.append(list(numbers))
        first.set()
        assert go_on.wait(5)

    with ThreadPoolExecutor(1) as pool:
        arrivals = GpuArrivals(pool, check)
        checks = [asyncio.create_task(arrivals.check(0))]
        await asyncio.to_thread(first.wait, 5)
        checks += [asyncio.create_task(arrivals.check(number)) for number in (1, 2, 3)]
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(*checks)
        await arrivals.check(4)
    assert seen == [[0], [1, 2, 3], [4]]


async def test_what_is_refused_is_told_to_all_that_were_checked_with_it_and_to_no_other() -> None:
    def check(numbers: Sequence[int]) -> None:
        if 1 in numbers:
            raise BytesRefused("bucket 1 has another digest")

    with ThreadPoolExecutor(1) as pool:
        arrivals = GpuArrivals(pool, check)
        await arrivals.check(0)
        found = await asyncio.gather(arrivals.check(1), arrivals.check(2), return_exceptions=True)
        assert all(isinstance(one, BytesRefused) for one in found)
        await arrivals.check(3)


async def test_one_that_is_given_up_does_not_keep_the_others_from_an_answer() -> None:
    began, go_on = threading.Event(), threading.Event()

    def check(numbers: Sequence[int]) -> None:
        began.set()
        assert go_on.wait(5)

    with ThreadPoolExecutor(1) as pool:
        arrivals = GpuArrivals(pool, check)
        given_up = asyncio.create_task(arrivals.check(0))
        await asyncio.to_thread(began.wait, 5)
        other = asyncio.create_task(arrivals.check(1))
        await asyncio.sleep(0)
        given_up.cancel()
        go_on.set()
        await other
        with pytest.raises(asyncio.CancelledError):
            await given_up
