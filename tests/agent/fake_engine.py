"""An engine in this process that follows the rules of SGLang that matter here: keys, pauses that hold requests, a cache
that cannot be flushed under running ones, weights that are mixed while they load, memory that is released, and what
kills it. `release` says whose rules: those of 0.5.17 differ.

`EngineRules` is the engine without HTTP; `FakeEngine` serves it. Both record what must never happen.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aiohttp import web

from sglang_rollout.agent.checkpoint import CheckpointRefused, compare, read_checkpoint
from sglang_rollout.agent.sglang_versions import NEWEST, Release
from sglang_rollout.protocol.memory import MemoryTag
from sglang_rollout.transfer.hook_call import Action, HookCall
from sglang_rollout.transfer.hook_report import HookReport, write_report
from sglang_rollout.transfer.stage_index import StageUnusable, read_index, read_manifest
from tests.free_ports import free_port

LOST, RANDOM = "released without a backup", "reset"


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
    counted: int = 0  # what /v1/loads tells: it stands still under a pause
    aborts: int = 0  # of all requests that run or wait for it
    at_the_door: int = 0  # requests that came while it was paused: its scheduler does not know of them
    fails_to_load: int = 0  # next loads that stop half way
    release: Release = NEWEST
    backup: bool = False  # --enable-weights-cpu-backup
    released: set[MemoryTag] = field(default_factory=set)
    snapshot: set[str] | None = None
    compares: bool = True  # False: no GPU, so the checker's comparison fails
    in_flight: bool = False  # a step that an in-place pause has left on the device
    profile: tuple[Path, str, int] | None = None  # folder, name, steps left
    watchdog_seconds: float = 300.0
    unhealthy: bool = False  # a generating health check failed: /ready answers 503 without a pause
    wedged: bool = False
    cached: bool = False  # there is a KV cache of the present weights
    stale: bool = False  # there is one of earlier weights
    tokens: int = 0
    stage: Path | None = None  # the folder that its weight loader reads, None without one
    session: bool = False  # of weight updates, open
    layouts: set[str] = field(default_factory=set)  # that the loader has rehearsed
    ranks: int = 1
    other_stages: tuple[Path, ...] = ()  # of the engine's other pods, one rank each
    silent_ranks: int = 0  # whose loader writes no report
    refuses: str = ""  # what the loader says of any weights that it is asked about
    served: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.path = self.boot_path
        self.identity = self.boot_path  # of the bytes: a folder, or the root that they were applied from
        self.labels = {self.boot_path: self.version}  # by identity
        self.held = {self.boot_path}

    # --- reading ---

    @property
    def ready(self) -> bool:
        return self.pause_mode is None and not self.unhealthy

    @property
    def mixed(self) -> bool:
        return self.held != {self.identity} or self.labels.get(self.identity) != self.version

    def token(self) -> bool:
        """One token for somebody, if the engine generates now; checks that it is of one version, truly labelled."""
        if not self.alive or self.pause_mode is not None or self.wedged:
            return False
        if self.mixed:
            self.violations.append(f"a token of {sorted(self.held)}, labelled {self.version} of {self.path}")
        if self.released:
            self._die(f"a token while {sorted(self.released)} is released")
        self.tokens += 1
        self._profiled_step()
        self.cached = True
        self.served.append(self.version)
        return True

    def load(self) -> int:
        if self.pause_mode is None:
            self.counted = self.running + self.grammar_queue
        return self.counted

    @property
    def idle(self) -> bool:
        """The scheduler's is_fully_idle, as a flush and a release see it; a retract puts what ran into the queue."""
        queued_counts = not (self.pause_mode == "retract" and self.release.flushes_queued)
        return not self.grammar_queue and not (self.running and queued_counts)

    # --- ordering ---

    def _die(self, why: str) -> None:
        self.violations.append(f"what kills the engine: {why}")
        self.alive = False
        raise EngineDied(why)

    def release_memory(self, tags: list[MemoryTag]) -> None:
        self.calls.append(f"release {' '.join(tags)}")
        if not self.idle:
            self._die("a release while requests run")
        if self.pause_mode is None:
            self.violations.append("released while a request could come")
        if twice := self.released & set(tags):
            self._die(f"a second release of {sorted(twice)}")
        self.released |= set(tags)
        if MemoryTag.KV_CACHE in tags:
            self.cached = self.stale = False
        if MemoryTag.WEIGHTS in tags and not self.backup:
            self.held = {LOST}

    def resume_memory(self, tags: list[MemoryTag]) -> None:
        self.calls.append(f"resume {' '.join(tags)}")
        if not set(tags) <= self.released:
            self._die(f"a resume of {sorted(set(tags) - self.released)}, which is not released")
        self.released -= set(tags)

    def check(self, action: str, fence: bool = False) -> tuple[bool, str, str]:
        """Whether it succeeded, its message and, of a checksum, the sum."""
        self.calls.append("fence" if fence else f"check {action}")
        if MemoryTag.WEIGHTS in self.released:
            self._die("weights were read while they are released")
        if fence and not self.release.cheap_fence:
            self.violations.append("a whole checksum in place of a fence")
        if action == "snapshot":
            self.snapshot = set(self.held)
        elif action == "reset_tensors":
            if self.pause_mode != "retract":
                self.violations.append("weights were reset under running requests")
            self.held = {RANDOM}
        elif action == "compare":
            return self._compare()
        else:
            self.in_flight = False
            return True, "Success.", hashlib.sha256(repr(sorted(self.held)).encode()).hexdigest()
        return True, "Success.", ""

    def _compare(self) -> tuple[bool, str, str]:
        if self.snapshot is None:
            return False, "", ""
        if not self.compares:
            return False, "Torch not compiled with CUDA enabled", ""
        if self.snapshot != self.held:
            names = "\n".join(f"name=model.layers.{n}.w max_abs_err=1.0 expect=a actual=b " for n in range(12))
            return False, f"check tensor equality failed:\n{names}", ""
        self.snapshot = None
        return True, "Success.", ""

    def start_profile(self, folder: Path, name: str, steps: int) -> bool:
        self.calls.append(f"profile {steps}")
        if self.profile is not None:
            return False
        self.profile = (folder, name, steps)
        return True

    def stop_profile(self) -> bool:
        self.calls.append("stop profile")
        profile, self.profile = self.profile, None
        if profile is None:
            return False
        profile[0].joinpath(f"{profile[1]}-TP-0.trace.json.gz").write_bytes(b"trace")
        return True

    def _profiled_step(self) -> None:
        if self.profile is not None:
            folder, name, steps = self.profile
            self.profile = (folder, name, steps - 1)
            if steps <= 1:
                self.stop_profile()

    def pause(self, mode: str) -> None:
        self.calls.append(f"pause {mode}")
        if mode == "abort":
            self.violations.append("SGLang's own abort mode, which may never return")
        # An in-place pause after a retracting one freezes nothing any more.
        self.load()
        self.in_flight = mode == "in_place" and (self.in_flight or (self.pause_mode is None and self.running > 0))
        self.pause_mode = mode if (mode, self.pause_mode) != ("in_place", "retract") else self.pause_mode

    def resume(self) -> None:
        self.calls.append("continue")
        if self.mixed:
            self.violations.append("continued with mixed weights")
        if self.released:
            self.violations.append(f"continued while {sorted(self.released)} is released")
        self.pause_mode = None
        self.in_flight = False
        self.running, self.at_the_door = self.running + self.at_the_door, 0

    def abort_all(self) -> None:
        self.calls.append("abort")
        self.aborts += 1
        self.running = self.grammar_queue = 0

    def flush(self) -> bool:
        self.calls.append("flush")
        if not self.idle:
            return False
        self.cached = self.stale = False
        return True

    def begin_load(self, path: str) -> str | None:
        """Why not, with nothing changed; None when the load has begun and the weights are mixed."""
        self.calls.append(f"load {Path(path).name}")
        if self.pause_mode is None:
            self.violations.append("weights were loaded into a running engine")
        if self.in_flight:
            self.violations.append("weights were loaded under a step in flight")
        if MemoryTag.WEIGHTS in self.released:
            self._die("weights were loaded where there is no memory for them")
        if not Path(path).is_dir():
            return f"Failed to get weights iterator: {path} is not there."
        try:
            compare(read_checkpoint(Path(path)), read_checkpoint(Path(self.boot_path)), Path(path))
        except CheckpointRefused as error:
            self._die(f"a load: {error}")
        self.held = self.held | {path}
        return None

    def end_load(self, path: str, version: str | None) -> bool:
        if self.fails_to_load:
            self.fails_to_load -= 1
            return False
        self.stale = self.stale or self.cached
        self.held = {path}
        self.path = self.identity = path
        self.served_name = path
        if version is not None:
            self.version = version
        self.labels[path] = self.version
        return True

    # --- updates by tensor, of which all come from our weight loader ---

    def begin_session(self) -> str:
        self.calls.append("begin")
        if self.session:
            return "a weight-update session is already open; call end_weight_update() first"
        self.session = True
        return ""

    def end_session(self) -> str:
        self.calls.append("end")
        if not self.session:
            return "no weight-update session is open; call begin_weight_update() first"
        self.session = False
        return ""

    def label(self, version: str) -> None:
        self.calls.append(f"label {version}")
        self.version = version

    def begin_hook(self, call: HookCall) -> HookReport:
        """A report with a problem when it ends here."""
        self.calls.append(f"hook {call.action}")
        report = HookReport(call.transaction, str(call.action), 0, self.ranks, "Tiny", 1, call.version, call.root)
        if self.stage is None:
            self._die(f"a call of a loader that it does not have: {call}")
        if self.release.weight_session and not self.session:
            self.violations.append("an update by tensor outside a session")
        if call.action is Action.REGISTER:
            if self.running and self.pause_mode is None:
                self.violations.append("an update that waits for running requests")
            return report
        if self.pause_mode is None:
            self.violations.append(f"a {call.action} on a running engine")
        try:
            assert self.stage is not None
            manifest = read_manifest(self.stage, read_index(self.stage).holding(call.root))
        except StageUnusable as error:
            return replace(report, problem=str(error))
        if self.refuses:
            return replace(report, problem=self.refuses)
        self.layouts.add(manifest.layout)
        if call.action is Action.APPLY:
            self.in_flight = False  # the loader waits for the device before it writes
            if MemoryTag.WEIGHTS in self.released:
                self._die("weights were loaded where there is no memory for them")
            self.held = self.held | {call.root}
        return replace(report, layouts=tuple(self.layouts))

    def end_hook(self, call: HookCall, report: HookReport) -> HookReport:
        if call.action is not Action.APPLY or report.problem:
            return report
        if self.fails_to_load:
            self.fails_to_load -= 1
            return replace(report, problem="half of them", written=True)
        assert self.stage is not None
        if not any(slot.sealed and slot.sealed.root == call.root for slot in read_index(self.stage).slots):
            return replace(report, problem="the stage was given up", written=True)
        self.stale = self.stale or self.cached
        self.held = {call.root}
        self.identity = call.root
        self.labels[call.root] = call.version
        return replace(report, written=True, compared="equal")

    def say(self, report: HookReport) -> None:
        assert self.stage is not None
        for rank in range(self.ranks - self.silent_ranks):
            own = self.ranks - len(self.other_stages)
            folder = self.stage if rank < own else self.other_stages[rank - own]
            held = [slot.sealed.root for slot in read_index(folder).slots if slot.sealed]
            lacks = report.root not in ("", *held)
            problem = f"{report.root[:12]} are not staged here" if lacks else report.problem
            write_report(folder, replace(report, rank=rank, problem=problem))


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ADMIN = {
    "/pause_generation",
    "/continue_generation",
    "/flush_cache",
    "/abort_request",
    "/update_weights_from_disk",
    "/begin_weight_update",
    "/end_weight_update",
    "/update_weights_from_tensor",
    "/update_weight_version",
    "/weights_checker",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/start_profile",
    "/stop_profile",
    "/server_info",
}
OPEN = {"/health", "/ready", "/metrics"}


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
        self.version = ""  # as it says itself, if not that of its rules
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
            ("POST", "/weights_checker", self._check),
            ("POST", "/release_memory_occupation", self._release),
            ("POST", "/resume_memory_occupation", self._resume_memory),
            ("POST", "/start_profile", self._start_profile),
            ("POST", "/stop_profile", self._stop_profile),
            ("POST", "/update_weights_from_disk", self._update),
            ("POST", "/begin_weight_update", self._begin),
            ("POST", "/end_weight_update", self._end),
            ("POST", "/update_weights_from_tensor", self._update_by_tensor),
            ("POST", "/update_weight_version", self._label),
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
        return web.json_response(
            {
                "version": self.version or str(self.rules.release),
                "watchdog_timeout": self.rules.watchdog_seconds,
                "tp_size": self.rules.ranks,
                "admin_api_key": self.rules.admin_key,
            }
        )

    async def _tags(self, request: web.Request) -> list[MemoryTag]:
        names = (await request.json())["tags"]
        by_name = {name: tag for tag, name in self.rules.release.memory_tags.items()}
        return [by_name[name] for name in names]

    async def _release(self, request: web.Request) -> web.Response:
        self.rules.release_memory(await self._tags(request))
        return web.json_response(None)

    async def _resume_memory(self, request: web.Request) -> web.Response:
        self.rules.resume_memory(await self._tags(request))
        return web.json_response(None)

    async def _check(self, request: web.Request) -> web.Response:
        body = await request.json()
        success, message, checksum = self.rules.check(body["action"], body.get("skip_tensor_list") == [""])
        answer: dict[str, Any] = {"success": success, "message": message}
        if checksum:
            info = {"role": "target", "tp_rank": 0, "tp_size": 1}
            told = [info] if self.rules.release is NEWEST else info
            answer |= {"ranks": [{"parallelism_info": told}], "per_engine_checksum": checksum}
        return web.json_response(answer, status=200 if success else 400)

    async def _start_profile(self, request: web.Request) -> web.Response:
        body = await request.json()
        begun = self.rules.start_profile(Path(body["output_dir"]), body["profile_id"], body["num_steps"])
        return web.Response(text="Start profiling.\n" if begun else "in progress", status=200 if begun else 500)

    async def _stop_profile(self, request: web.Request) -> web.Response:
        return web.Response(text="Stop profiling.\n", status=200 if self.rules.stop_profile() else 500)

    async def _loads(self, request: web.Request) -> web.Response:
        load = {"num_running_reqs": self.rules.load(), "num_waiting_reqs": 0}
        return web.json_response({"loads": [load]})

    async def _generate(self, request: web.Request) -> web.Response:
        """Held while paused; a request that runs is frozen or put back, and goes on after continue."""
        wanted = (await request.json())["sampling_params"]["max_new_tokens"]
        versions: list[str] = []
        while not self._resumed.is_set():  # at the door, where no abort reaches it
            await self._resumed.wait()
        rules, aborts = self.rules, self.rules.aborts
        rules.running += 1
        try:
            while len(versions) < wanted:
                if rules.aborts > aborts:
                    return web.json_response({"meta_info": {"finish_reason": {"type": "abort"}}})
                if rules.token():
                    versions.append(rules.version)
                await asyncio.sleep(self.token_seconds)
        finally:
            if rules.aborts == aborts:
                rules.running -= 1
        return web.json_response({"versions": versions, "meta_info": {"weight_version": rules.version}})

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

    async def _begin(self, request: web.Request) -> web.Response:
        assert (await request.json()) == {"selector": "all"}
        return _success(self.rules.begin_session())

    async def _end(self, request: web.Request) -> web.Response:
        return _success(self.rules.end_session())

    async def _label(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["abort_all_requests"] is False
        self.rules.label(body["new_version"])
        return web.json_response({"success": True, "message": "", "new_version": body["new_version"]})

    async def _update_by_tensor(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert len(body["serialized_named_tensors"]) == self.rules.ranks
        call = HookCall.from_name(name_in(base64.b64decode(body["serialized_named_tensors"][0])))
        report = self.rules.begin_hook(call)
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(self.load_seconds if call.action is Action.APPLY else 0.0)
        if not self.rules.alive:
            raise EngineDied
        self.rules.say(self.rules.end_hook(call, report))
        return _success("")


def _success(problem: str) -> web.Response:
    return web.json_response({"success": not problem, "message": problem}, status=400 if problem else 200)


def name_in(pickled: bytes) -> str:
    """The one name in the pickle of hook_call.request_body."""
    begin = pickled.index(b"X") + 1
    (length,) = struct.unpack_from("<I", pickled, begin)
    return pickled[begin + 4 : begin + 4 + length].decode()
