"""The operator's own HTTP server: /livez, /readyz and /metrics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

Check = Callable[[], str]
"""Empty when all is well, else what is wrong."""


class OperatorServer:
    """port 0: any free one; see `port` after start()."""

    def __init__(
        self, port: int, *, live: Check, ready: Check, registry: CollectorRegistry, refresh: Callable[[], None]
    ) -> None:
        self.port = port
        self._live = live
        self._ready = ready
        self._registry = registry
        self._refresh = refresh
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/livez", self._check(self._live))
        app.router.add_get("/readyz", self._check(self._ready))
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, None, self.port)
        await site.start()
        # With port 0 the IPv4 and IPv6 sockets have ports of their own.
        self.port = min(self._runner.addresses, key=len)[1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @staticmethod
    def _check(check: Check) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def answer(_: web.Request) -> web.Response:
            problem = check()
            return web.Response(text=problem or "ok", status=503 if problem else 200)

        return answer

    async def _metrics(self, _: web.Request) -> web.Response:
        self._refresh()
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
