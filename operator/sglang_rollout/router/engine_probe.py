"""Asks an engine whether it would serve a router that presents this key, before the router is told of it: a router
would keep on trying an engine that is not there, and list one that refuses the key."""

from __future__ import annotations

import asyncio

import aiohttp

from sglang_rollout.protocol.routing import Worker

PROBE_SECONDS = 2.0


class EngineProbe:
    """GET /model_info, which a paused engine answers too."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def objection(self, worker: Worker) -> str:
        """Why the engine should not be registered now; empty when nothing speaks against it."""
        headers = {"Authorization": f"Bearer {worker.api_key}"}
        try:
            async with (
                asyncio.timeout(PROBE_SECONDS),
                self._session.get(f"{worker.url}/model_info", headers=headers) as response,
            ):
                if response.status in (401, 403):
                    return f"{worker.engine} at {worker.url} refuses its key: it has started again"
                return "" if response.ok else f"{worker.engine} at {worker.url} answers {response.status}"
        except TimeoutError:
            return f"{worker.engine} at {worker.url} gives no answer within {PROBE_SECONDS:.0f} s"
        except aiohttp.ClientError as error:
            return f"{worker.engine} at {worker.url} cannot be reached: {error or type(error).__name__}"
