"""Requests that decode all the while, in a process of their own, with the moment of every token."""

from __future__ import annotations

import asyncio
import bisect
import itertools
import multiprocessing
import re
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import aiohttp

BEFORE = 0.8  # seconds before an event, by whose rate it is judged
RESUMED = 0.6  # seconds after it, in which running requests are taken up again
AFTER = 1.4  # of which the rest, behind RESUMED, is judged by as well
LEAD = 0.2  # and before that, in which the first step lies that is counted from
TOKENS = 1200  # of a request: none ends while an event is looked at, and all find room in a small KV cache
_COUNT = re.compile(rb'"completion_tokens":\s*(\d+)')


@dataclass(frozen=True)
class Window:
    """`gap`: the longest time without a token of any stream; `lost`: seconds of decoding that did not happen, at the
    mean rate of the time before and behind; `rate`: that rate."""

    gap: float
    lost: float
    rate: float


def window(stamps: list[float], begin: float, end: float) -> Window:
    """Of an event, from the moments of all tokens from a little before `begin` - BEFORE to `end` + AFTER. Counts from
    the last token of a step to that of another, since the tokens of one step come together. Raises ValueError when
    there are too few."""
    edges = [bisect.bisect_right(stamps, at) - 1 for at in (begin - BEFORE, begin, end + RESUMED, end + AFTER)]
    start, last, first, over = edges
    if not 0 <= start < last <= first < over:
        raise ValueError("the streams did not decode around the event")
    rate = (_rate(stamps, start, last) + _rate(stamps, first, over)) / 2
    gap = max(later - earlier for earlier, later in itertools.pairwise(stamps[last : first + 1]))
    return Window(gap, stamps[first] - stamps[last] - (first - last) / rate, rate)


def _rate(stamps: list[float], begin: int, end: int) -> float:
    return (end - begin) / max(stamps[end] - stamps[begin], 1e-9)


class DecodeStreams:
    """Times are those of time.monotonic(), which all processes share."""

    def __init__(self, url: str, streams: int, key: str = "") -> None:
        """`key` of the engine's data routes."""
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, url, streams, key), daemon=True)

    def __enter__(self) -> DecodeStreams:
        self._process.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.join(10)

    def stamps(self, begin: float, end: float) -> list[float]:
        """The moment of each token, one entry a token."""
        found: list[float] = self._ask(("stamps", begin, end))
        return found

    def failed(self) -> int:
        """Requests, since the beginning."""
        count: int = self._ask(("failed",))
        return count

    def wait_begun(self, since: float, seconds: float = 60.0) -> None:
        """Until every stream has a token of a request that it sent after `since`. Raises TimeoutError."""
        limit = time.monotonic() + seconds
        while not self._ask(("begun", since)):
            if time.monotonic() > limit:
                raise TimeoutError(f"not every stream decodes after {seconds:.0f} s")
            time.sleep(0.02)

    def rate(self, seconds: float) -> float:
        """Tokens a second from now on."""
        begin = time.monotonic()
        time.sleep(seconds)
        end = time.monotonic()
        return len(self.stamps(begin, end)) / (end - begin)

    def around(self, begin: float, end: float) -> Window:
        """Of an event, once AFTER seconds have gone since. Raises ValueError."""
        time.sleep(max(0.0, end + AFTER - time.monotonic()))
        return window(self.stamps(begin - BEFORE - LEAD, end + AFTER), begin, end)

    def _ask(self, question: tuple[Any, ...]) -> Any:
        self._ours.send(question)
        if not self._ours.poll(30):
            raise TimeoutError("the streams do not answer")
        return self._ours.recv()


def _run(pipe: Connection, url: str, streams: int, key: str) -> None:
    asyncio.run(_Load(url, key).run(pipe, streams))


class _Load:
    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._stamps: list[float] = []
        self._sent: dict[int, float] = {}  # by stream: when the request was sent whose tokens come
        self._failed = 0

    async def run(self, pipe: Connection, streams: int) -> None:
        timeout = aiohttp.ClientTimeout(total=300)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=1 << 20) as session:
            tasks = [asyncio.create_task(self._stream(session, number)) for number in range(streams)]
            asked: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
            loop = asyncio.get_running_loop()
            loop.add_reader(pipe.fileno(), lambda: asked.put_nowait(pipe.recv()))
            while True:
                kind, *values = await asked.get()
                assert all(not task.done() for task in tasks)
                if kind == "stamps":
                    low, high = (
                        bisect.bisect_left(self._stamps, values[0]),
                        bisect.bisect_right(self._stamps, values[1]),
                    )
                    pipe.send(self._stamps[low:high])
                elif kind == "begun":
                    pipe.send(sum(sent > values[0] for sent in self._sent.values()) == streams)
                else:
                    pipe.send(self._failed)

    async def _stream(self, session: aiohttp.ClientSession, number: int) -> None:
        sampling = {"max_new_tokens": TOKENS, "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": [5 + number] * 64, "stream": True, "sampling_params": sampling}
        while True:
            sent = time.monotonic()
            tokens = 0
            try:
                async with session.post(self._url + "/generate", json=body, headers=self._headers) as response:
                    if response.status != 200:
                        raise aiohttp.ClientError(f"answered {response.status}")
                    async for line in response.content:
                        if line.startswith(b"data: {") and (found := _COUNT.search(line)):
                            count = int(found[1])
                            self._stamps.extend([time.monotonic()] * (count - tokens))
                            tokens = count
                            self._sent[number] = sent
            except (aiohttp.ClientError, TimeoutError, ValueError):
                self._failed += 1
                await asyncio.sleep(0.5)
