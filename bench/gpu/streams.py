"""Requests that decode all the while, in a process of their own, with the moment of every token."""

from __future__ import annotations

import asyncio
import bisect
import itertools
import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType

import aiohttp

BEFORE = 0.3  # seconds of the window that is looked at, before the event
AFTER = 1.5
TOKENS = 256  # of the shortest request


@dataclass(frozen=True)
class Window:
    """`gap`: the longest time without a token of any stream; `lost`: seconds of decoding at the base rate that did not
    happen. `failed` requests since the beginning."""

    gap: float
    lost: float
    failed: int


class DecodeStreams:
    """Times are those of time.monotonic(), which all processes share."""

    def __init__(self, url: str, streams: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, url, streams), daemon=True)

    def __enter__(self) -> DecodeStreams:
        self._process.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.join(10)

    def stamps(self, begin: float, end: float) -> tuple[list[float], int]:
        self._ours.send((begin, end))
        if not self._ours.poll(30):
            raise TimeoutError("the streams do not answer")
        answer: tuple[list[float], int] = self._ours.recv()
        return answer

    def rate(self, seconds: float) -> float:
        """Tokens a second from now on."""
        begin = time.monotonic()
        time.sleep(seconds)
        end = time.monotonic()
        return len(self.stamps(begin, end)[0]) / (end - begin)

    def steady_rate(self, seconds: float = 3.0, tolerance: float = 0.03, attempts: int = 20) -> float:
        """Once two spans in a row agree: the first tokens wait for kernels to be compiled."""
        before = self.rate(seconds)
        for _ in range(attempts):
            now = self.rate(seconds)
            if before and abs(now / before - 1) < tolerance:
                return (before + now) / 2
            before = now
        return before

    def around(self, begin: float, end: float, base: float) -> Window:
        """Of an event, at least AFTER seconds after it."""
        wide = (begin - BEFORE, end + AFTER)
        stamps, failed = self.stamps(*wide)
        edges = [wide[0], *stamps, wide[1]]
        gap = max(later - earlier for earlier, later in itertools.pairwise(edges))
        return Window(gap, (wide[1] - wide[0]) - len(stamps) / base if base else 0.0, failed)


def _run(pipe: Connection, url: str, streams: int) -> None:
    asyncio.run(_Load(url).run(pipe, streams))


class _Load:
    def __init__(self, url: str) -> None:
        self._url = url
        self._stamps: list[float] = []
        self._failed = 0

    async def run(self, pipe: Connection, streams: int) -> None:
        timeout = aiohttp.ClientTimeout(total=300)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=1 << 20) as session:
            tasks = [asyncio.create_task(self._stream(session, number)) for number in range(streams)]
            asked: asyncio.Queue[tuple[float, float]] = asyncio.Queue()
            loop = asyncio.get_running_loop()
            loop.add_reader(pipe.fileno(), lambda: asked.put_nowait(pipe.recv()))
            while True:
                begin, end = await asked.get()
                low, high = bisect.bisect_left(self._stamps, begin), bisect.bisect_right(self._stamps, end)
                pipe.send((self._stamps[low:high], self._failed))
                assert all(not task.done() for task in tasks)

    async def _stream(self, session: aiohttp.ClientSession, number: int) -> None:
        body = {
            "input_ids": [5 + number] * 64,
            "stream": True,
            # Of different lengths, so that they do not all begin anew at once.
            "sampling_params": {"max_new_tokens": TOKENS + 9 * number, "temperature": 1.0, "ignore_eos": True},
        }
        while True:
            try:
                async with session.post(self._url + "/generate", json=body) as response:
                    if response.status != 200:
                        raise aiohttp.ClientError(f"answered {response.status}")
                    async for line in response.content:
                        if line.startswith(b"data: {"):
                            self._stamps.append(time.monotonic())
            except (aiohttp.ClientError, TimeoutError, ValueError):
                self._failed += 1
                await asyncio.sleep(0.5)
