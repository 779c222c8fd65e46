"""What an engine itself answers, asked again and again through the API server's pod proxy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import httpx

from e2e.deployment.connection import Connection, pod_url
from e2e.deployment.errors import DeploymentError
from sglang_rollout.protocol.pod import ENGINE_PORT

ASK_SECONDS = 0.01  # between two questions to one engine
ANSWER_SECONDS = 5.0
PAUSED, RUNNING = 503, 200  # SGLang's /ready


class EngineView:
    """The engine in one pod."""

    def __init__(self, connection: Connection, namespace: str, pod: str) -> None:
        self.pod = pod
        self._client = connection.client
        self._url = pod_url(namespace, pod, ENGINE_PORT)

    async def answers(self, path: str, status: int, seconds: float, every: float = ASK_SECONDS) -> float:
        """When GET `path` was first answered with this HTTP status, in monotonic seconds. Raises DeploymentError."""
        return await self._until(path, lambda found: found == status, seconds, every)

    async def is_lost(self, seconds: float) -> float:
        """When it first did not answer /health well: the API server says so for an engine that is gone."""
        return await self._until("/health", lambda found: found != RUNNING, seconds, ASK_SECONDS)

    async def _until(self, path: str, holds: Callable[[int], bool], seconds: float, every: float) -> float:
        deadline = time.monotonic() + seconds
        while True:
            found = await self._status(path)
            now = time.monotonic()
            if holds(found):
                return now
            if now > deadline:
                raise DeploymentError(f"{self.pod} still answers {path} with {found} after {seconds:.0f} s")
            await asyncio.sleep(every)

    async def _status(self, path: str) -> int:
        """0 when nobody answers."""
        try:
            return (await self._client.get(self._url + path, timeout=ANSWER_SECONDS)).status_code
        except httpx.HTTPError:
            return 0


async def all_are(engines: Sequence[EngineView], readiness: int, seconds: float = 60.0) -> float:
    """When the last of them answered /ready with PAUSED or RUNNING."""
    return max(await asyncio.gather(*(one.answers("/ready", readiness, seconds) for one in engines)))
