"""Clients that read tokens as they come through the router, and the longest time that one of them saw none."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import pairwise

import httpx

from e2e.deployment.connection import Connection, service_url
from e2e.deployment.errors import DeploymentError
from e2e.deployment.router_client import Request
from sglang_rollout.api.names import router_name
from sglang_rollout.protocol.pod import ROUTER_PORT

SILENCE_SECONDS = 120.0


@dataclass
class TokenStream:
    """One request. moments: when it was sent and when each of its chunks came, in monotonic seconds."""

    moments: list[float]
    ended: bool = False


@dataclass
class TokenStreams:
    """All requests so far, of all clients."""

    streams: list[TokenStream] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def longest_gap(self, begin: float, end: float, now: float) -> float:
        """Seconds: the longest time without a token for any client that began before `end`, from `begin` on. Waiting
        for the first token counts, and so does waiting that lasts `now`."""
        gaps = [
            after - max(before, begin)
            for stream in self.streams
            for before, after in pairwise(stream.moments if stream.ended else [*stream.moments, now])
            if after > begin and before < end
        ]
        return max(gaps, default=0.0)

    async def more(self, chunks: int) -> None:
        """Returns when so many more have come, to all clients together."""
        wanted = self._chunks() + chunks
        async with asyncio.timeout(SILENCE_SECONDS):
            while self._chunks() < wanted:
                self.news.clear()
                await self.news.wait()

    def _chunks(self) -> int:
        return sum(len(stream.moments) for stream in self.streams)


@contextlib.asynccontextmanager
async def token_streams(
    connection: Connection, namespace: str, fleet: str, clients: int, tokens: int
) -> AsyncIterator[TokenStreams]:
    """For the time of the block, `clients` clients ask for `tokens` tokens, again and again. Raises DeploymentError at
    the end when a request failed."""
    url = f"{service_url(namespace, router_name(fleet), ROUTER_PORT)}/generate"
    body = {**Request(tokens=tokens).body(), "stream": True}
    streams = TokenStreams()

    async def one_client() -> None:
        while True:
            stream = TokenStream([time.monotonic()])
            streams.streams.append(stream)
            async with connection.client.stream("POST", url, json=body, timeout=SILENCE_SECONDS) as answer:
                if answer.status_code != 200:
                    raise DeploymentError(f"a stream was answered {answer.status_code}: {await answer.aread()!r}")
                async for line in answer.aiter_lines():
                    if line.startswith("data:") and "[DONE]" not in line:
                        stream.moments.append(time.monotonic())
                        streams.news.set()
            stream.ended = True

    tasks = [asyncio.create_task(one_client()) for _ in range(clients)]
    try:
        yield streams
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, (DeploymentError, httpx.HTTPError)):
            raise DeploymentError(f"a token stream failed: {type(result).__name__}: {result}") from result
