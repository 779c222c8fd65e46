"""The worker API of smg 1.13 and of sglang-router 0.3.2: list, add, update and remove workers.

Both answer 202 and do the work later, so what counts is what they list afterwards:
- smg lists a removed worker as `draining` for five more seconds, in which it gets no new request, running ones end
  and its URL cannot be added again. An update in that time would bring it back into routing: none is sent.
- Without runtime_type and connection_mode smg tries to find them out, for half a minute when a key is wrong.
- A worker that is being added is not listed; adding it again answers 409.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp

from sglang_rollout.protocol.routing import Worker

from .membership import Action, Add, ListedWorker, Remove, Update, worker_labels

LIST_SECONDS = 5.0
CHANGE_SECONDS = 10.0


class RouterUnreachable(Exception):
    """The router gave no answer. absent: nothing listens at its address, so it serves nobody either; otherwise it may
    just be slow."""

    def __init__(self, sentence: str, absent: bool = False) -> None:
        super().__init__(sentence)
        self.absent = absent


class RouterRefused(Exception):
    """The router answered, but did not do it."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class WorkersApi:
    """One router. credential: read on every call, so that a rotated one counts; empty: none
    is sent; what it raises comes through."""

    def __init__(self, session: aiohttp.ClientSession, url: str, credential: Callable[[], str], fleet: str) -> None:
        self._session = session
        self._url = url.rstrip("/")
        self._credential = credential
        self._fleet = fleet

    async def list(self) -> tuple[ListedWorker, ...]:
        """Raises RouterUnreachable and RouterRefused."""
        _, body = await self._call("GET", "/workers", None, LIST_SECONDS)
        try:
            return tuple(_listed(entry) for entry in body["workers"])
        except (KeyError, TypeError, AttributeError) as error:
            raise RouterRefused(200, f"GET /workers is not a list of workers: {error!r}") from error

    async def perform(self, action: Action) -> None:
        """Hands `action` to the router, which does it later. Raises RouterUnreachable and RouterRefused."""
        match action:
            case Add(worker):
                await self._add(worker)
            case Update(id=worker_id, worker=worker):
                await self._update(worker_id, worker)
            case Remove(id=worker_id):
                await self._call("DELETE", f"/workers/{worker_id}", None, CHANGE_SECONDS, {404})

    async def _add(self, worker: Worker) -> None:
        body = {
            "url": worker.url,
            "api_key": worker.api_key,
            "runtime_type": "sglang",
            "connection_mode": "http",
            "labels": worker_labels(worker, self._fleet),
        }
        # 409: it is being added, or something else of this URL is; the next listing tells.
        await self._call("POST", "/workers", body, CHANGE_SECONDS, {409})

    async def _update(self, worker_id: str, worker: Worker) -> None:
        body = {"api_key": worker.api_key, "labels": worker_labels(worker, self._fleet)}
        path = f"/workers/{worker_id}"
        status, _ = await self._call("PATCH", path, body, CHANGE_SECONDS, {404, 405})
        if status == 405:  # sglang-router: there PUT updates what is given, while at smg it replaces the worker
            await self._call("PUT", path, body, CHANGE_SECONDS, {404})

    async def _call(
        self, method: str, path: str, body: Any, seconds: float, accept: frozenset[int] | set[int] = frozenset()
    ) -> tuple[int, Any]:
        key = self._credential()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            async with (
                asyncio.timeout(seconds),
                self._session.request(method, self._url + path, json=body, headers=headers) as response,
            ):
                text = await response.text()
                if response.status >= 400 and response.status not in accept:
                    raise RouterRefused(response.status, f"{method} {path}: {response.status} {text[:300]}")
                answer = await response.json(content_type=None) if response.ok else None
                return response.status, answer
        except TimeoutError as error:
            raise RouterUnreachable(f"{method} {path}: no answer within {seconds:.0f} s") from error
        except aiohttp.ClientError as error:
            absent = isinstance(error, aiohttp.ClientConnectorError)
            raise RouterUnreachable(f"{method} {path}: {error or type(error).__name__}", absent) from error
        except ValueError as error:
            raise RouterRefused(200, f"{method} {path}: the answer is not JSON: {error}") from error


def _listed(entry: dict[str, Any]) -> ListedWorker:
    labels = entry.get("labels") or entry.get("metadata") or {}  # sglang-router calls them metadata
    return ListedWorker(
        id=str(entry["id"]),
        url=str(entry["url"]).rstrip("/"),
        labels={str(name): str(value) for name, value in labels.items()},
        healthy=bool(entry.get("is_healthy")),
        leaving=entry.get("status") == "draining",
    )
