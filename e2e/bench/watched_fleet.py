"""A fleet whose every change is seen as it comes, by a watch: asking again and again would load what is measured."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import httpx

from e2e.deployment.connection import Object, rollouts_path
from e2e.deployment.errors import DeploymentError
from e2e.deployment.fleet import Fleet, describe, is_ready
from sglang_rollout.api import SGLangRollout

WATCH_SECONDS = 1800


@dataclass
class WatchedFleet:
    """seen: the newest version of the resource; changed: set by each."""

    fleet: Fleet
    seen: SGLangRollout
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, what: str, holds: Callable[[SGLangRollout], bool], seconds: float) -> float:
        """When it held, in monotonic seconds. Raises DeploymentError with the conditions when the time is over."""
        try:
            async with asyncio.timeout(seconds):
                while not holds(self.seen):
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            raise DeploymentError(f"waited {seconds:.0f} s for {what}\n{describe(self.seen)}") from None
        return time.monotonic()

    async def ready(self, generation: int, seconds: float = 120.0) -> float:
        """When Ready was True for this generation."""
        return await self.until(f"Ready at generation {generation}", lambda one: is_ready(one, generation), seconds)

    def take(self, value: Object) -> None:
        self.seen = SGLangRollout.from_object(value)
        self.changed.set()


@contextlib.asynccontextmanager
async def watched(fleet: Fleet) -> AsyncIterator[WatchedFleet]:
    """For the time of the block."""
    first = await fleet.object()
    found = WatchedFleet(fleet, SGLangRollout.from_object(first))
    following = asyncio.create_task(_follow(found, first["metadata"]["resourceVersion"]))
    try:
        yield found
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def _follow(found: WatchedFleet, since: str) -> None:
    """Until cancelled. A watch that ends goes on from where it was."""
    client, fleet = found.fleet.connection.client, found.fleet
    while True:
        query = {
            "watch": "1",
            "fieldSelector": f"metadata.name={fleet.name}",
            "resourceVersion": since,
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        path = rollouts_path(fleet.namespace)
        with contextlib.suppress(httpx.HTTPError):
            async with client.stream("GET", path, params=query, timeout=WATCH_SECONDS + 30) as answer:
                async for line in answer.aiter_lines():
                    event = json.loads(line)
                    if event["type"] in ("ADDED", "MODIFIED"):
                        since = event["object"]["metadata"]["resourceVersion"]
                        found.take(event["object"])
        await asyncio.sleep(0.2)
