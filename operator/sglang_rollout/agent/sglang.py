"""SGLang's HTTP interface as the agent uses it (srt/entrypoints/http_server.py): one method a route, each with a
deadline. What differs between releases is told by sglang_versions."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from sglang_rollout.protocol.memory import MemoryTag
from sglang_rollout.protocol.weights import PauseMode, WeightVersion
from sglang_rollout.transfer.dtypes import DTYPES
from sglang_rollout.transfer.manifest import Tensor

from .engine_http import EngineError, EngineHttp, one_line
from .sglang_versions import NEWEST, Release

READ_SECONDS = 5.0
CONTROL_SECONDS = 30.0
WATCHDOG_SECONDS = 300.0  # SGLang's own default
MEMORY_SECONDS = 120.0  # a resume copies the backup of the weights to the device
SWEEP_AGAIN_SECONDS = 0.1

# SGLang's own "abort" mode loops until nothing holds its update lock, for ever on an engine paused in place.
_PAUSE_MODES = {PauseMode.ABORT: "retract", PauseMode.RETRACT: "retract", PauseMode.IN_PLACE: "in_place"}
# Counters that grow while tokens are made; their sum standing still means that nothing is.
_PROGRESS = re.compile(
    r"^sglang:(?:realtime_tokens|generation_tokens|prompt_tokens|num_requests|num_aborted_requests)_total"
    r"(?:\{[^}]*\})? ([0-9.eE+-]+)",
    re.MULTILINE,
)


class CacheBusy(EngineError):
    """/flush_cache answered 400: requests that pausing does not reach still use the cache."""


@dataclass(frozen=True)
class ModelInfo:
    version: str
    path: str


@dataclass(frozen=True)
class Load:
    running: int
    queued: int

    @property
    def requests(self) -> int:
        return self.running + self.queued


@dataclass(frozen=True)
class ServerInfo:
    version: str
    watchdog_seconds: float  # of the scheduler: --watchdog-timeout
    ranks: int = 1  # of tensor parallelism
    device: str = ""  # "cuda", "cpu"


@dataclass(frozen=True)
class UpdateGroup:
    """A group of processes that the engine's ranks join from `first_rank` on; whoever has rank 0 broadcasts. address
    and port: of its rendezvous. backend: torch's name, "nccl" or "gloo"."""

    name: str
    address: str
    port: int
    first_rank: int
    world: int
    backend: str


@dataclass(frozen=True)
class Answer:
    status: int
    text: str


class SGLang:
    """One start of the engine on this pod, addressed with the keys of that start."""

    def __init__(self, session: aiohttp.ClientSession, url: str, data_key: str, admin_key: str) -> None:
        self._http = EngineHttp(session, url)
        self._data = {"Authorization": f"Bearer {data_key}"}
        self._admin = {"Authorization": f"Bearer {admin_key}"}
        self.release: Release = NEWEST
        self.spent = self._http.spent

    # --- reading ---

    async def healthy(self) -> bool:
        """/health without generating: the server is up and its warm-up is over."""
        status, _ = await self._http.call("GET", "/health", None, self._data, READ_SECONDS)
        return status == 200

    async def ready(self) -> bool:
        """/ready: neither paused nor called unhealthy by SGLang's own generating health check."""
        status, _ = await self._http.call("GET", "/ready", None, self._data, READ_SECONDS)
        return status == 200

    async def model_info(self) -> ModelInfo:
        info = await self._http.ok("GET", "/model_info", None, self._data, READ_SECONDS)
        try:
            return ModelInfo(str(info["weight_version"]), str(info["model_path"]))
        except (KeyError, TypeError) as error:
            raise EngineError(f"/model_info lacks {error}") from error

    async def server_info(self) -> ServerInfo:
        info = await self._http.ok("GET", "/server_info", None, self._admin, CONTROL_SECONDS)
        try:
            watchdog = float(info.get("watchdog_timeout", WATCHDOG_SECONDS) or 0.0)
            return ServerInfo(
                str(info["version"]), watchdog, int(info.get("tp_size", 1)), str(info.get("device", "cuda"))
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(f"/server_info has another form than expected: {error!r}") from error

    async def load(self) -> Load:
        """Requests on all of the engine's schedulers; those that wait at a pause are not among them. Counted with the
        schedulers' steps: while it is paused, what was there before."""
        answer = await self._http.ok("GET", "/v1/loads?include=core", None, self._data, READ_SECONDS)
        try:
            loads = answer["loads"]
            return Load(
                sum(int(load["num_running_reqs"]) for load in loads),
                sum(int(load["num_waiting_reqs"]) for load in loads),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"/v1/loads has another form than expected: {error!r}") from error

    async def progress(self) -> float:
        """A number that stands still only while no token is made and no request ends."""
        status, body = await self._http.call("GET", "/metrics", None, self._data, READ_SECONDS)
        if status != 200:
            raise EngineError(f"/metrics answered {status}")
        return sum(float(value) for value in _PROGRESS.findall(body))

    async def generate_one(self, seconds: float) -> None:
        """Generates one token, as any request would."""
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}, "log_metrics": False}
        await self._http.ok("POST", "/generate", body, self._data, seconds)

    # --- ordering ---

    async def pause(self, mode: PauseMode) -> None:
        """Returns when the engine is paused, by ABORT when nothing of what ran is left as well."""
        await self._http.ok("POST", "/pause_generation", {"mode": _PAUSE_MODES[mode]}, self._admin, CONTROL_SECONDS)
        if mode is PauseMode.ABORT:
            await self.sweep()

    async def sweep(self) -> None:
        """Aborts all requests of a paused engine; twice, for one that was on its way to the scheduler. Those that the
        pause holds at the server's door are not among them. How many are left is told by nothing while it is paused:
        /v1/loads stands still then."""
        await self.abort_all()
        await asyncio.sleep(SWEEP_AGAIN_SECONDS)
        await self.abort_all()

    async def abort_all(self) -> None:
        await self._http.ok("POST", "/abort_request", {"rid": "", "abort_all": True}, self._admin, CONTROL_SECONDS)

    async def continue_generation(self) -> None:
        await self._http.ok("POST", "/continue_generation", {}, self._admin, CONTROL_SECONDS)

    async def flush_cache(self) -> None:
        """Raises CacheBusy."""
        status, body = await self._http.call("POST", "/flush_cache", None, self._admin, CONTROL_SECONDS)
        if status == 400:
            raise CacheBusy("the cache cannot be flushed: " + one_line(body))
        if status != 200:
            raise EngineError(f"/flush_cache answered {status}: {one_line(body)}")

    async def fence(self) -> None:
        """Waits until every rank's device has done what it was given: an in-place pause leaves a step in flight.
        Release.cheap_fence says whether this engine can."""
        body = {"action": "checksum", "skip_tensor_list": [""]}
        await self._http.ok("POST", "/weights_checker", body, self._admin, CONTROL_SECONDS)

    async def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Kills the engine if a request runs or one of them is released already."""
        await self._memory("/release_memory_occupation", tags)

    async def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Kills the engine if one of them is not released."""
        await self._memory("/resume_memory_occupation", tags)

    async def _memory(self, path: str, tags: Sequence[MemoryTag]) -> None:
        body = {"tags": [self.release.memory_tags[tag] for tag in tags]}
        await self._http.ok("POST", path, body, self._admin, MEMORY_SECONDS)

    async def check_weights(self, action: str, seconds: float) -> Answer:
        """Any answer: status 400 means both that tensors differ and that it cannot be told."""
        body = {"action": action}
        return Answer(*await self._http.call("POST", "/weights_checker", body, self._admin, seconds))

    async def start_profile(self, folder: str, steps: int, name: str) -> None:
        """The traces' names begin with `name`. It ends by itself after `steps` steps of the scheduler."""
        body = {"output_dir": folder, "num_steps": steps, "profile_id": name}
        status, text = await self._http.call("POST", "/start_profile", body, self._admin, CONTROL_SECONDS)
        if status != 200:
            raise EngineError(f"/start_profile answered {status}: {one_line(text)}")

    async def stop_profile(self, seconds: float) -> bool:
        """False when none was under way."""
        status, _ = await self._http.call("POST", "/stop_profile", None, self._admin, seconds)
        return status == 200

    async def load_from_disk(self, weights: WeightVersion, seconds: float) -> None:
        """New weights and their label, without flushing or aborting. Raises EngineError, after which any part of
        them may be in."""
        body = {
            "model_path": weights.path,
            "weight_version": weights.version,
            "flush_cache": False,
            "abort_all_requests": False,
        }
        await self._update("/update_weights_from_disk", body, seconds)

    async def begin_weight_update(self) -> None:
        """Opens the session that updates by tensor are made in (Release.weight_session). One that is open was left by
        somebody who is gone: it is closed, and all of the update is made again."""
        if not self.release.weight_session:
            return
        body = {"selector": "all"}
        status, text = await self._http.call("POST", "/begin_weight_update", body, self._admin, CONTROL_SECONDS)
        if status == 400 and "already open" in text:
            await self.end_weight_update()
            status, text = await self._http.call("POST", "/begin_weight_update", body, self._admin, CONTROL_SECONDS)
        if status != 200:
            raise EngineError(f"/begin_weight_update answered {status}: {one_line(text)}")

    async def end_weight_update(self) -> None:
        if self.release.weight_session:
            await self._http.ok("POST", "/end_weight_update", {}, self._admin, CONTROL_SECONDS)

    async def update_weights_from_tensor(self, body: dict[str, Any], seconds: float) -> None:
        """`body` as SGLang wants it. Raises EngineError."""
        await self._update("/update_weights_from_tensor", body, seconds)

    async def set_weight_version(self, version: str) -> None:
        """The label of what was put in by tensors; running requests go on. Raises EngineError, also when the engine
        tells another label than that."""
        body = {"new_version": version, "abort_all_requests": False}
        answer = await self._update("/update_weight_version", body, CONTROL_SECONDS)
        if answer.get("new_version") != version:
            raise EngineError(f"/update_weight_version: the engine says that it holds {answer.get('new_version')!r}")

    async def init_update_group(self, group: UpdateGroup, seconds: float) -> None:
        """Every rank of the engine joins. Its schedulers stand still until all others have: EngineUnreachable means
        that they still do, and nothing but the end of the process frees them."""
        body = {
            "master_address": group.address,
            "master_port": group.port,
            "rank_offset": group.first_rank,
            "world_size": group.world,
            "group_name": group.name,
            "backend": group.backend,
        }
        await self._http.ok("POST", "/init_weights_update_group", body, self._admin, seconds)

    async def destroy_update_group(self, name: str, seconds: float) -> None:
        await self._http.ok("POST", "/destroy_weights_update_group", {"group_name": name}, self._admin, seconds)

    async def update_weights_from_distributed(self, group: str, tensors: Sequence[Tensor], seconds: float) -> None:
        """Receives one broadcast of `tensors`, joined in that order, and loads them, without flushing, aborting or
        relabelling. As init_update_group, it stands still until the sender has sent. Raises EngineError, after which
        any part of them may be in."""
        body = {
            "names": [tensor.name for tensor in tensors],
            "dtypes": [DTYPES[tensor.dtype].torch for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
            "group_name": group,
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "abort_all_requests": False,
        }
        await self._update("/update_weights_from_distributed", body, seconds)

    async def _update(self, path: str, body: dict[str, Any], seconds: float) -> dict[str, Any]:
        answer = await self._http.ok("POST", path, body, self._admin, seconds)
        if not (isinstance(answer, dict) and answer.get("success") is True):
            raise EngineError(f"{path}: {one_line(str(answer))}")
        return answer
