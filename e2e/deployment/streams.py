"""Generations that are watched while they run: token by token, through the router."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from e2e.deployment.connection import Connection, service_url
from e2e.deployment.errors import DeploymentError
from e2e.deployment.router_client import Request
from sglang_rollout.api.names import router_name
from sglang_rollout.protocol.pod import ROUTER_PORT

SILENCE_SECONDS = 240.0  # longer than any pause of a test
LOOK_SECONDS = 0.05


@dataclass
class Stream:
    """One request so far. tokens: the ids that came; retractions: SGLang's num_retractions; finish: the type of its
    finish_reason, empty while it goes on; error: how it failed."""

    tokens: list[int] = field(default_factory=list)
    retractions: int = 0
    finish: str = ""
    version: str = ""
    error: str = ""

    @property
    def ended(self) -> bool:
        return bool(self.finish or self.error)

    def take(self, chunk: dict[str, Any]) -> None:
        """SGLang's chunks hold everything since the beginning. Raises DeploymentError when one takes tokens back."""
        meta = chunk["meta_info"]
        tokens = list(chunk.get("output_ids") or [])
        if meta["finish_reason"] and not tokens:
            tokens = self.tokens  # an abort may come without them
        if tokens[: len(self.tokens)] != self.tokens:
            raise DeploymentError(f"tokens were lost: {len(self.tokens)} were there, then {len(tokens)} others")
        self.tokens = tokens
        self.retractions = max(self.retractions, int(meta.get("num_retractions") or 0))
        self.version = str(meta.get("weight_version", self.version))
        if meta["finish_reason"]:
            self.finish = str(meta["finish_reason"]["type"])


class Streams:
    """Requests that were sent at the same time. Made by `streams`."""

    def __init__(self, count: int) -> None:
        self.all = [Stream() for _ in range(count)]

    @property
    def counts(self) -> list[int]:
        """Tokens of each."""
        return [len(one.tokens) for one in self.all]

    @property
    def errors(self) -> list[str]:
        return [one.error for one in self.all if one.error]

    async def until(self, what: str, holds: Callable[[list[Stream]], bool], *, timeout: float = 60) -> None:
        """Raises DeploymentError when `timeout` seconds are over."""
        deadline = time.monotonic() + timeout
        while not holds(self.all):
            if time.monotonic() > deadline:
                listed = ", ".join(f"{len(one.tokens)} {one.finish or one.error or '...'}" for one in self.all)
                raise DeploymentError(f"waited {timeout:.0f} s for {what}; streams: {listed}")
            await asyncio.sleep(LOOK_SECONDS)

    async def until_ended(self, *, timeout: float = 120) -> None:
        await self.until("the end of all streams", lambda all_: all(one.ended for one in all_), timeout=timeout)


@contextlib.asynccontextmanager
async def streams(
    connection: Connection, namespace: str, fleet: str, count: int, request: Request
) -> AsyncIterator[Streams]:
    """Send `count` requests at once; at the end of the block those that still run are given up."""
    url = f"{service_url(namespace, router_name(fleet), ROUTER_PORT)}/generate"
    body = {**request.body(), "stream": True}
    made = Streams(count)
    tasks = [asyncio.create_task(_read(connection.client, url, body, one)) for one in made.all]
    try:
        yield made
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _read(client: httpx.AsyncClient, url: str, body: dict[str, Any], stream: Stream) -> None:
    try:
        async with client.stream("POST", url, json=body, timeout=SILENCE_SECONDS) as answer:
            if answer.status_code != 200:
                stream.error = f"{answer.status_code}: {(await answer.aread()).decode(errors='replace')[:300]}"
                return
            async for line in answer.aiter_lines():
                data = line.removeprefix("data:").strip()
                if line.startswith("data:") and data != "[DONE]":
                    stream.take(json.loads(data))
        if not stream.finish:
            stream.error = "cut off"
    except (httpx.HTTPError, DeploymentError, KeyError, TypeError, ValueError) as error:
        stream.error = f"{type(error).__name__}: {error}"
