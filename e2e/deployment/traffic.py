"""Requests that never stop: a few clients, each asking again as soon as it has its answer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence

from e2e.deployment.answers import Answer
from e2e.deployment.errors import DeploymentError
from e2e.deployment.router_client import Request, RouterClient

# After a failure a client waits a moment, so that an outage does not become thousands of answers.
PAUSE_AFTER_FAILURE = 0.2


class Traffic:
    """What the clients got so far. Made by `traffic`."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.waiting = 0

    def since(self, moment: float) -> list[Answer]:
        """Answers to requests that were sent after `moment` (monotonic seconds)."""
        return [one for one in self.answers if one.sent >= moment]

    async def more(self, count: int = 1, *, timeout: float = 120, version: str | None = None) -> list[Answer]:
        """The next `count` good answers to requests sent from now on; of one version, when it is given.
        Raises DeploymentError when `timeout` seconds are over."""
        begin = time.monotonic()
        while True:
            good = [one for one in self.since(begin) if one.ok and version in (None, one.version)]
            if len(good) >= count:
                return good
            if time.monotonic() - begin > timeout:
                wanted = "answers" if version is None else f"answers of version {version}"
                raise DeploymentError(f"{len(good)} of {count} {wanted} in {timeout:.0f} s, {self.waiting} waiting")
            await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def traffic(client: RouterClient, requests: Sequence[Request] = (Request(),) * 4) -> AsyncIterator[Traffic]:
    """One client for each of `requests`, which repeats it for the time of the block; at its end the last ones are
    answered, or given up after a while and counted as failures."""
    seen = Traffic()
    stop = asyncio.Event()

    async def one_client(request: Request) -> None:
        while not stop.is_set():
            seen.waiting += 1
            answer = await client.generate(request)
            seen.waiting -= 1
            seen.answers.append(answer)
            if not answer.ok:
                await asyncio.sleep(PAUSE_AFTER_FAILURE)

    tasks = [asyncio.create_task(one_client(request)) for request in requests]
    try:
        yield seen
        stop.set()
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
