"""smg's worker API with its habits, as measured on smg 1.13.0: everything is done later, removal drains for a while."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

CONTROL_KEY = "control-key"


@dataclass
class Entry:
    id: str
    url: str
    api_key: str
    labels: dict[str, str]
    status: str = "pending"


@dataclass
class FakeSmg:
    """Adds are listed after `add_seconds`, removed workers drain for `drain_seconds`. `sglang_router`: has the older
    router's habits instead (no PATCH, nothing drains, labels are called metadata). `slow`, `refusing`: it does not say
    which workers it has, and goes on serving them."""

    add_seconds: float = 0.01
    drain_seconds: float = 0.05
    sglang_router: bool = False
    slow: bool = False
    refusing: bool = False
    entries: dict[str, Entry] = field(default_factory=dict)
    calls: list[tuple[str, str]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    _ids: int = 0

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._authenticated])
        app.router.add_get("/workers", self._list)
        app.router.add_post("/workers", self._add)
        app.router.add_patch("/workers/{id}", self._patch)
        app.router.add_put("/workers/{id}", self._put)
        app.router.add_delete("/workers/{id}", self._delete)
        return app

    def restart(self) -> None:
        self.entries.clear()

    def routable(self) -> dict[str, str]:
        """URL -> key, of the workers that get requests."""
        return {entry.url: entry.api_key for entry in self.entries.values() if entry.status == "ready"}

    def put_worker(self, url: str, api_key: str, labels: dict[str, str] | None = None) -> Entry:
        """A worker that is there already, whoever registered it."""
        self._ids += 1
        entry = Entry(f"id-{self._ids:04d}", url, api_key, dict(labels or {}), "ready")
        self.entries[entry.id] = entry
        return entry

    @web.middleware
    async def _authenticated(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {CONTROL_KEY}":
            return web.Response(status=401, text="Missing or invalid Authorization header")
        if request.method != "GET":
            self.calls.append((request.method, request.path))
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _list(self, request: web.Request) -> web.Response:
        if self.refusing:
            return web.Response(status=503, text="not now")
        if self.slow:
            await asyncio.sleep(1.0)
        shown = [entry for entry in self.entries.values() if entry.status != "pending"]
        return web.json_response({"workers": [self._shown(entry) for entry in shown], "total": len(shown)})

    def _shown(self, entry: Entry) -> dict[str, Any]:
        labels = {**entry.labels, "tp_size": "1"}
        known = {"id": entry.id, "url": entry.url, "is_healthy": entry.status == "ready"}
        if self.sglang_router:
            return {**known, "metadata": labels}
        return {**known, "labels": labels, "status": entry.status}

    async def _add(self, request: web.Request) -> web.Response:
        body = await request.json()
        if any(entry.url == body["url"] for entry in self.entries.values()):
            return web.json_response({"error": "exists", "code": "WORKER_ALREADY_EXISTS"}, status=409)
        entry = self.put_worker(body["url"], body.get("api_key", ""), body.get("labels"))
        entry.status = "pending"
        self._later(self.add_seconds, entry, "ready")
        return web.json_response({"status": "accepted", "worker_id": entry.id}, status=202)

    async def _patch(self, request: web.Request) -> web.Response:
        if self.sglang_router:
            return web.Response(status=405)
        return await self._change(request)

    async def _put(self, request: web.Request) -> web.Response:
        if not self.sglang_router:
            self.faults.append("PUT replaces a worker of smg's as a whole")
        return await self._change(request)

    async def _change(self, request: web.Request) -> web.Response:
        body, entry = await request.json(), self.entries.get(request.match_info["id"])
        if entry is None:
            return web.json_response({"error": "not found"}, status=404)
        if entry.status == "draining":
            self.faults.append(f"brought {entry.url} back into routing while it drained")
            entry.status = "ready"
        entry.api_key = body.get("api_key", entry.api_key)
        entry.labels.update(body.get("labels", {}))
        return web.json_response({"status": "accepted"}, status=202)

    async def _delete(self, request: web.Request) -> web.Response:
        entry = self.entries.get(request.match_info["id"])
        if entry is None:
            return web.json_response({"error": "not found"}, status=404)
        if entry.status != "draining":
            entry.status = "draining"
            self._later(0 if self.sglang_router else self.drain_seconds, entry, "gone")
        return web.json_response({"status": "accepted"}, status=202)

    def _later(self, seconds: float, entry: Entry, status: str) -> None:
        def become() -> None:
            if self.entries.get(entry.id) is not entry:
                return
            if status == "gone":
                del self.entries[entry.id]
            elif entry.status == "pending":
                entry.status = status

        if seconds:
            asyncio.get_running_loop().call_later(seconds, become)
        else:
            become()
