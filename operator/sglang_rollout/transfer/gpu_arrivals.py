"""Checks of buckets that came into GPU memory. Each lets an engine that decodes on the same GPU wait: so all that came
since the last one are checked at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor


class GpuArrivals:
    """In one event loop."""

    def __init__(self, pool: Executor, check: Callable[[Sequence[int]], None]) -> None:
        """check: of these buckets' numbers; blocks, and raises what is wrong with any of them."""
        self._pool = pool
        self._check = check
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._work: asyncio.Task[None] | None = None

    async def check(self, number: int) -> None:
        """Raises what `check` raises, of this one or of one that came with it."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((number, done))
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._check_all())
        await done

    async def _check_all(self) -> None:
        while self._waiting:
            together, self._waiting = self._waiting, []
            numbers = [number for number, _ in together]
            try:
                await asyncio.get_running_loop().run_in_executor(self._pool, self._check, numbers)
            except Exception as error:
                for _, done in together:
                    if not done.done():
                        done.set_exception(error)
            else:
                for _, done in together:
                    if not done.done():
                        done.set_result(None)
