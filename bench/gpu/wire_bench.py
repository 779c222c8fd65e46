"""What the wire's measurements run on: a trainer, one engine or two with their agents, and streams that decode."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

from e2e.agent.local_pod import LocalPod
from sglang_rollout.protocol.report import AgentReport
from sglang_rollout.protocol.weights import (
    KVCache,
    PauseMode,
    Source,
    SourceKind,
    Step,
    WeightMove,
    WeightVersion,
)

from .memory import processes
from .models import total_bytes
from .pods import GpuPod
from .streams import BEFORE, LEAD, DecodeStreams
from .trainer_process import TrainerProcess, interpreter, torch_environment

EXPECTING = {"peer_key": "bench", "expects_trainer": True}
"""What an operator tells agents of a fleet whose weights a trainer sends: the receiving process is kept ready."""
MOVE_SECONDS = 120.0
TRAINER_SECONDS = 90.0
LOG_BYTES = 4_000_000
ROOM = ("--mem-fraction-static", "0.6", "--max-total-tokens", "65536")  # for two engines and a trainer on one GPU
LAST_LINES = 12  # of an engine's log, which may be long ones
VERSIONS = ("v1", "v2")


class Engines(StrEnum):
    """Which engines run. The first one decodes; the trainer is on GPU 0, so it is on GPU 1 where it needs only one and
    there are two."""

    ONE = "one"
    PAIR = "pair"
    TP2 = "tp2"


class Bench:
    """Processes, and what steps are made of. work: a folder of its own, with the logs. one_gpu: everything is on
    GPU 0."""

    def __init__(self, work: Path, *, shape: str, cpu: bool, streams: int, one_gpu: bool = False) -> None:
        self.work, self.logs = work, work / "logs"
        self.shape, self.cpu, self.one_gpu = shape, cpu, one_gpu
        self.size = total_bytes(shape)
        self.boot = WeightVersion("v1", str(work / "v1"))
        self.engines = Engines.ONE
        self.pods: list[LocalPod] = []
        self.trainer: TrainerProcess | None = None
        self.serves = "v1"
        self.from_disk: list[str] = []  # checksums of v1, as the engine loaded it from disk
        self._count = streams
        self._serial = 0
        self._streams: DecodeStreams | None = None

    @property
    def pod(self) -> LocalPod:
        return self.pods[0]

    @property
    def streams(self) -> DecodeStreams:
        assert self._streams is not None
        return self._streams

    # --- processes ---

    async def prepare(self, engines: Engines, bare: Callable[[bool], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        """All but the engines, whose packages are imported meanwhile. `bare` measures while nothing else is on the
        GPUs."""
        begin = time.monotonic()
        self._launch(engines)

        async def trainer() -> dict[str, Any]:
            found = await bare(self.cpu)
            await self.start_trainer()
            return found

        found, _ = await asyncio.gather(trainer(), asyncio.to_thread(self._write_checkpoint))
        return {"bare": found, "trainer and checkpoint, s": round(time.monotonic() - begin, 1)}

    async def start_trainer(self) -> None:
        self.trainer = TrainerProcess(self.shape, self.cpu, self.logs / "trainer.log")
        async with asyncio.timeout(TRAINER_SECONDS):
            await self.trainer.ready()

    async def start(self, engines: Engines, extra: Sequence[str] = ()) -> dict[str, Any]:
        """In place of those that serve. extra: flags of SGLang."""
        begin = time.monotonic()
        if self.engines is not engines or self._streams is not None or extra:
            await self._stop_pods()
            self._launch(engines, extra)
        for one in self.pods:
            await one.put(one.desired(**EXPECTING))
        reports = await asyncio.gather(*(_serving(one) for one in self.pods))
        found: dict[str, Any] = {"all serve, s": round(time.monotonic() - begin, 1)}
        self.serves = "v1"
        self.from_disk = await self.checksums(self.pod)
        self._streams = await self.decoding(self.pod)
        found["SGLang"] = reports[0].engine.sglang_version
        found["decode, tok/s"] = round(await asyncio.to_thread(self.streams.rate, 3.0))
        found["memory"] = await asyncio.to_thread(memory)
        return found

    async def decoding(self, one: LocalPod) -> DecodeStreams:
        """Streams on this engine, once all of them decode. The caller ends them."""
        streams = DecodeStreams(one.url, self._count, one.record.data_key)
        streams.__enter__()
        try:
            await asyncio.to_thread(streams.wait_begun, 0.0, 120.0)
        except BaseException:
            streams.__exit__(None, None, None)
            raise
        await asyncio.sleep(3.0)
        return streams

    async def stop(self) -> None:
        """All that runs. Raises what went wrong first, once everything has been tried."""
        trainer = [] if self.trainer is None else [self.trainer.kill()]
        for failure in await asyncio.gather(self._stop_pods(), *trainer, return_exceptions=True):
            if isinstance(failure, BaseException):
                raise failure

    async def _stop_pods(self) -> None:
        if self._streams is not None:
            await asyncio.to_thread(self._streams.__exit__, None, None, None)
            self._streams = None
        try:
            await asyncio.gather(*(one.stop() for one in self.pods))
        finally:
            self._keep_logs()
        self.pods = []

    def _keep_logs(self) -> None:
        for one in self.pods:
            for log in ("agent.log", "engine.log"):
                with suppress(FileNotFoundError):
                    tail = (one.folder / log).read_bytes()[-LOG_BYTES:]
                    (self.logs / f"{one.folder.name}-{log}").write_bytes(tail)

    def _launch(self, engines: Engines, extra: Sequence[str] = ()) -> None:
        """Their processes, which wait for orders."""
        self.engines, self.pods = engines, self._pods(engines)
        for one in self.pods:
            one.engine_args += extra
            one.start_agent()
            one.start_launcher()

    def _write_checkpoint(self) -> None:
        words = [self.boot.path, self.shape, "1", "cpu" if self.cpu else "cuda"]
        subprocess.run(
            [interpreter(self.cpu), "-m", "bench.gpu.models", *words], env=torch_environment(), check=True, timeout=120
        )

    def _pods(self, engines: Engines) -> list[LocalPod]:
        match engines:
            case Engines.TP2:
                return [self._new_pod("engine-tp2", "1,0", 2)]
            case Engines.PAIR:
                return [self._new_pod("engine-0", "1,0", 1), self._new_pod("engine-1", "0,1", 1)]
            case _:
                return [self._new_pod("engine-0", "1,0", 1)]

    def _new_pod(self, name: str, gpus: str, tp: int) -> LocalPod:
        folder = self.work / name
        if self.cpu:
            return LocalPod(folder, self.boot, tp=tp, staged_versions=2)
        pod = GpuPod(folder, self.boot, gpus="0" if self.one_gpu else gpus, tp=tp, name=name)
        if self.one_gpu:
            pod.engine_args += ROOM  # SGLang takes the last of a flag
        return pod

    # --- what steps are made of ---

    async def engine_post(self, path: str, body: object) -> str:
        return await self.pod.admin_call(path, body)

    async def checksums(self, one: LocalPod) -> list[str]:
        """SGLang's own, over all parameters, of each rank; takes seconds."""
        answer = json.loads(await one.admin_call("/weights_checker", {"action": "checksum"}))
        whole = [str(answer.get("per_engine_checksum", ""))]
        return [str(rank["per_gpu_checksum"]) for rank in answer.get("ranks", ())] or whole

    async def begin_alike(self) -> None:
        """All requests anew, so that everything meets prompts and outputs of the same lengths."""
        now = time.monotonic()
        await self.engine_post("/abort_request", {"rid": "", "abort_all": True})
        await asyncio.to_thread(self.streams.wait_begun, now)
        await asyncio.sleep(BEFORE + LEAD + 0.1)

    def label(self) -> str:
        self._serial += 1
        return f"w{self._serial}"

    def other(self) -> str:
        return VERSIONS[1] if self.serves == VERSIONS[0] else VERSIONS[0]

    def move(self, label: str, until: Step, kind: SourceKind = SourceKind.STAGED, **source: Any) -> WeightMove:
        assert self.trainer is not None
        source = {"senders": [f"127.0.0.1:{self.trainer.port}"], "members": 1, "epoch": 1, **source}
        mode = source.pop("pause_mode", PauseMode.IN_PLACE)
        return WeightMove(
            f"move-{label}",
            WeightVersion(label, ""),
            until,
            mode,
            KVCache.KEEP,
            timeout_seconds=MOVE_SECONDS,
            source=Source(kind, **source),
        )

    async def make(self, wanted: WeightMove, one: LocalPod | None = None) -> AgentReport:
        """Returns when it is done, or has failed."""
        one = one or self.pod
        await one.put(one.desired(move=wanted, **EXPECTING))
        return await one.until(lambda report: settled(wanted, report), MOVE_SECONDS)


async def _serving(one: LocalPod) -> AgentReport:
    """Raises RuntimeError as soon as its engine has ended."""
    serving = asyncio.create_task(one.serving())
    ended = asyncio.create_task(one.launcher_ended())
    try:
        await asyncio.wait({serving, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            tail = "\n".join(one.log("engine.log").splitlines()[-LAST_LINES:])
            raise RuntimeError(f"{one.folder.name} ended with {ended.result()} instead of serving:\n{tail}")
        return await serving
    finally:
        serving.cancel()
        ended.cancel()


def settled(wanted: WeightMove, report: AgentReport) -> bool:
    found = report.move
    return found is not None and found.id == wanted.id and (found.reached >= wanted.until or found.error != "")


def memory() -> dict[str, str]:
    try:
        return processes()
    except OSError:
        return {}
