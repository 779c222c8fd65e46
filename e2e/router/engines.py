"""Small engines for tests of the routers: they answer the routes that a router asks an SGLang engine, want its key,
and hold requests while paused, as SGLang does."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

from aiohttp import web
from aiohttp.typedefs import Handler

from tests.free_ports import free_port

OPEN_PATHS = {"/health", "/ready"}


class SmallEngine:
    """One engine at `url`. `served` counts generations answered whole, `refused` calls without the key, `held`
    generations that wait or run now, `arrived` generations that came in: more than were sent means that the router
    sent some twice."""

    def __init__(self, version: str = "1", key: str = "key-1", port: int | None = None) -> None:
        self.version = version
        self.key = key
        self.port = port or free_port()
        self.arrived = 0
        self.served = 0
        self.refused = 0
        self.held = 0
        self.seen: Counter[str] = Counter()
        self._running = asyncio.Event()
        self._running.set()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application(middlewares=[self._want_key])
        for path in OPEN_PATHS:
            app.router.add_get(path, self._health)
        for path in ("/model_info", "/get_model_info"):
            app.router.add_get(path, self._model_info)
        for path in ("/server_info", "/get_server_info"):
            app.router.add_get(path, self._server_info)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_post("/generate", self._generate)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def pause(self) -> None:
        self._running.clear()

    def resume(self) -> None:
        self._running.set()

    @web.middleware
    async def _want_key(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.seen[request.path] += 1
        if request.path not in OPEN_PATHS and request.headers.get("Authorization") != f"Bearer {self.key}":
            self.refused += 1
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def _health(self, request: web.Request) -> web.Response:
        if request.path == "/ready" and not self._running.is_set():
            return web.Response(status=503)
        return web.Response()

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "model_path": f"/models/{self.version}",
                "tokenizer_path": f"/models/{self.version}",
                "served_model_name": "tiny",
                "is_generation": True,
                "weight_version": self.version,
                "model_type": "qwen3",
                "architectures": ["Qwen3ForCausalLM"],
            }
        )

    async def _server_info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "model_path": f"/models/{self.version}",
                "served_model_name": "tiny",
                "weight_version": self.version,
                "tp_size": 1,
                "dp_size": 1,
                "version": "0.5.23",
                "internal_states": [{}],
            }
        )

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "tiny", "object": "model", "root": "tiny"}]})

    async def _loads(self, request: web.Request) -> web.Response:
        waiting = 0 if self._running.is_set() else self.held
        load = {"dp_rank": 0, "num_running_reqs": self.held - waiting, "num_waiting_reqs": waiting, "token_usage": 0.0}
        return web.json_response({"timestamp": 0, "loads": [load]})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        self.arrived += 1
        self.held += 1
        try:
            body = await request.json()
            if body.get("stream"):
                return await self._stream(request)
            await self._running.wait()
            self.served += 1
            return web.json_response(self._result(1))
        finally:
            self.held -= 1

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        """Two pieces, then whatever pause is on, then two more."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in range(1, 5):
            if piece == 3:
                await self._running.wait()
            await response.write(f"data: {json.dumps(self._result(piece))}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        self.served += 1
        return response

    def _result(self, tokens: int) -> dict[str, object]:
        meta = {"weight_version": self.version, "completion_tokens": tokens, "port": self.port}
        return {"text": "x" * tokens, "output_ids": [1] * tokens, "meta_info": meta}
