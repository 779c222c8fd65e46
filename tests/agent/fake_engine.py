"""An engine in this process that follows the rules of SGLang 0.5.23 that matter here: keys, pauses that hold requests,
a cache that cannot be flushed under running ones, weights that are mixed while they load, and what kills it.

`EngineRules` is the engine without HTTP; `FakeEngine` serves it. Both record what must never happen.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from sglang_rollout.agent.checkpoint import CheckpointRefused, compare, read_manifest


class EngineDied(Exception):
    """The engine's process ended while it was serving the call."""


@dataclass
class EngineRules:
    """held: the checkpoints that the bytes of the weights are of; more than one while and after a broken load.
    violations: what the operator promises never to happen, as sentences."""

    boot_path: str
    version: str
    data_key: str = "data"
    admin_key: str = "admin"
    served_name: str = "model"
    pause_mode: str | None = None
    alive: bool = True
    grammar_queue: int = 0  # requests that make flush answer 400 whatever the pause
    running: int = 0  # requests that generate
    fails_to_load: int = 0  # next loads that stop half way
    unhealthy: bool = False  # a generating health check failed: /ready answers 503 without a pause
    wedged: bool = False
    cached: bool = False  # there is a KV cache of the present weights
    stale: bool = False  # there is one of earlier weights
    tokens: int = 0
    served: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.path = self.boot_path
        self.held = {self.boot_path}

    # --- reading ---

    @property
    def ready(self) -> bool:
        return self.pause_mode is None and not self.unhealthy

    @property
    def mixed(self) -> bool:
        return self.held != {self.path}

    def token(self) -> bool:
        """One token for somebody, if the engine generates now; checks that it is of one version, truly labelled."""
        if not self.alive or self.pause_mode is not None or self.wedged:
            return False
        if self.mixed:
            self.violations.append(f"a token of {sorted(self.held)}, labelled {self.version} of {self.path}")
        self.tokens += 1
        self.cached = True
        self.served.append(self.version)
        return True

    # --- ordering ---

    def pause(self, mode: str) -> None:
        self.calls.append(f"pause {mode}")
        if mode == "abort":
            self.violations.append("SGLang's own abort mode, which may never return")
        self.pause_mode = mode

    def resume(self) -> None:
        self.calls.append("continue")
        if self.mixed:
            self.violations.append("continued with mixed weights")
        self.pause_mode = None

    def abort_all(self) -> None:
        self.calls.append("abort")
        self.running = self.grammar_queue = 0

    def flush(self) -> bool:
        self.calls.append("flush")
        if self.grammar_queue or (self.running and self.pause_mode != "retract"):
            return False
        self.cached = self.stale = False
        return True

    def begin_load(self, path: str) -> str | None:
        """Why not, with nothing changed; None when the load has begun and the weights are mixed."""
        self.calls.append(f"load {Path(path).name}")
        if self.pause_mode is None:
            self.violations.append("weights were loaded into a running engine")
        if not Path(path).is_dir():
            return f"Failed to get weights iterator: {path} is not there."
        try:
            compare(read_manifest(Path(path)), read_manifest(Path(self.boot_path)), Path(path))
        except CheckpointRefused as error:
            self.violations.append(f"a load that kills the engine: {error}")
            self.alive = False
            raise EngineDied from error
        self.held = self.held | {path}
        return None

    def end_load(self, path: str, version: str | None) -> bool:
        if self.fails_to_load:
            self.fails_to_load -= 1
            return False
        self.stale = self.stale or self.cached
        self.held = {path}
        self.path = path
        self.served_name = path
        if version is not None:
            self.version = version
        return True


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ADMIN = {
    "/pause_generation",
    "/continue_generation",
    "/flush_cache",
    "/abort_request",
    "/update_weights_from_disk",
    "/weights_checker",
    "/server_info",
}
OPEN = {"/health", "/ready", "/metrics"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class FakeEngine:
    """Serves EngineRules over HTTP on 127.0.0.1.

    Knobs: `delays` (seconds before a route answers), `failures` (statuses that a route answers next, in order),
    `load_seconds`, `token_seconds`, `on_death` (called once when the process ends).
    """

    def __init__(self, rules: EngineRules, port: int | None = None) -> None:
        self.rules = rules
        self.port = port or free_port()
        self.delays: dict[str, float] = {}
        self.failures: dict[str, list[int]] = {}
        self.load_seconds = 0.0
        self.token_seconds = 0.002
        self.on_death: Callable[[], None] = lambda: None
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application(middlewares=[self._gate])
        for method, path, handler in (
            ("GET", "/health", self._ok),
            ("GET", "/ready", self._ready),
            ("GET", "/metrics", self._metrics),
            ("GET", "/model_info", self._model_info),
            ("GET", "/server_info", self._server_info),
            ("GET", "/v1/loads", self._loads),
            ("POST", "/generate", self._generate),
            ("POST", "/pause_generation", self._pause),
            ("POST", "/continue_generation", self._continue),
            ("POST", "/flush_cache", self._flush),
            ("POST", "/abort_request", self._abort),
            ("POST", "/weights_checker", self._ok),
            ("POST", "/update_weights_from_disk", self._update),
        ):
            app.router.add_route(method, path, handler)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def stop(self) -> None:
        """Ends as a killed process does: connections are cut."""
        self.rules.alive = False
        runner, self._runner = self._runner, None
        if runner is not None:
            for server in [runner.server] if runner.server else []:
                for connection in list(server.connections):
                    if connection.transport is not None:
                        connection.transport.abort()
            await runner.cleanup()

    @web.middleware
    async def _gate(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        wanted = self.rules.admin_key if request.path in ADMIN else self.rules.data_key
        if request.path not in OPEN and key != wanted:
            return web.json_response({"error": "Unauthorized"}, status=401)
        await asyncio.sleep(self.delays.get(request.path, 0.0))
        if statuses := self.failures.get(request.path):
            return web.json_response({"error": "told to fail"}, status=statuses.pop(0))
        try:
            return await handler(request)
        except EngineDied:
            self.on_death()
            assert request.transport is not None
            request.transport.abort()
            raise

    async def _ok(self, request: web.Request) -> web.Response:
        return web.json_response({"success": True})

    async def _ready(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.rules.ready else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        text = f'sglang:realtime_tokens_total{{mode="decode",tp_rank="0"}} {self.rules.tokens}.0\n'
        return web.Response(text=text + 'sglang:num_requests_total{model_name="m"} 0.0\n')

    async def _model_info(self, request: web.Request) -> web.Response:
        rules = self.rules
        return web.json_response(
            {"model_path": rules.path, "weight_version": rules.version, "served_model_name": rules.served_name}
        )

    async def _server_info(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.5.23", "admin_api_key": self.rules.admin_key})

    async def _loads(self, request: web.Request) -> web.Response:
        load = {"num_running_reqs": self.rules.running, "num_waiting_reqs": self.rules.grammar_queue}
        return web.json_response({"loads": [load]})

    async def _generate(self, request: web.Request) -> web.Response:
        """Held while paused; a request that runs is frozen or put back, and goes on after continue."""
        wanted = (await request.json())["sampling_params"]["max_new_tokens"]
        versions: list[str] = []
        started = False
        try:
            while len(versions) < wanted:
                await self._resumed.wait()
                if not started:
                    started = True
                    self.rules.running += 1
                elif not self.rules.running:
                    return web.json_response({"meta_info": {"finish_reason": {"type": "abort"}}})
                if self.rules.token():
                    versions.append(self.rules.version)
                await asyncio.sleep(self.token_seconds)
        finally:
            if started and self.rules.running:
                self.rules.running -= 1
        return web.json_response({"versions": versions, "meta_info": {"weight_version": self.rules.version}})

    async def _pause(self, request: web.Request) -> web.Response:
        self.rules.pause((await request.json())["mode"])
        self._resumed.clear()
        return web.json_response({"status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        self.rules.resume()
        self._resumed.set()
        return web.json_response({"status": "ok"})

    async def _flush(self, request: web.Request) -> web.Response:
        if self.rules.flush():
            return web.Response(text="Cache flushed.\n")
        return web.Response(status=400, text="Flush cache failed.\n")

    async def _abort(self, request: web.Request) -> web.Response:
        assert (await request.json())["abort_all"] is True
        self.rules.abort_all()
        return web.Response()

    async def _update(self, request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json()
        path = body["model_path"]
        if why := self.rules.begin_load(path):
            return web.json_response({"success": False, "message": why}, status=400)
        with suppress(asyncio.CancelledError):  # the scheduler goes on when its caller has gone
            await asyncio.sleep(self.load_seconds)
        if not self.rules.alive:
            raise EngineDied
        if not self.rules.end_load(path, body["weight_version"]):
            return web.json_response({"success": False, "message": "half of them"}, status=400)
        return web.json_response({"success": True, "message": "Succeeded.", "num_paused_requests": 0})
