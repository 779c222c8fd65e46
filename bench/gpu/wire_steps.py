"""What is measured on the wire: transfers beside decoding, commits, and a catch-up from another agent."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import httpx

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

from .models import total_bytes
from .pods import GpuPod
from .streams import BEFORE, LEAD, DecodeStreams

ROOT = Path(__file__).parents[2]
PEER_KEY = "bench"
MOVE_SECONDS = 120.0
VERSIONS = ("v1", "v2")


class TrainerProcess:
    def __init__(self, shape: str, cpu: bool, log: Path) -> None:
        words = json.dumps({"shape": shape, "device": "cpu" if cpu else "cuda:0"})
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [interpreter(cpu), "-m", "bench.gpu.trainer", words],
                env=torch_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.port = 0
        self._said: list[dict[str, Any]] = []
        self._news = asyncio.Condition()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await asyncio.to_thread(self.process.stdout.readline):
            if line.startswith("{"):
                await self._add(json.loads(line))
        await self._add({"ended": self.process.wait()})

    async def _add(self, words: dict[str, Any]) -> None:
        async with self._news:
            self._said.append(words)
            self._news.notify_all()

    async def said(self, key: str, value: Any = None) -> dict[str, Any]:
        """The first thing that it said, or says, of this; taken away. Raises RuntimeError when it has ended."""
        async with self._news:
            while True:
                for words in self._said:
                    if key in words and value in (None, words[key]):
                        self._said.remove(words)
                        return words
                if any("ended" in words for words in self._said):
                    raise RuntimeError(f"the trainer has ended without a word of {key}")
                await self._news.wait()

    async def ready(self) -> None:
        self.port = int((await self.said("port"))["port"])

    async def done(self, label: str, *, waits: bool = True) -> dict[str, Any]:
        """What came of a sending. One whose agents are gone `waits` for others: it is left to itself then."""
        try:
            async with asyncio.timeout(MOVE_SECONDS if waits else 5.0):
                return await self.said("done", label)
        except TimeoutError:
            return {"error": "it still waits for agents", "at": time.monotonic()}

    def order(self, **words: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.cancel()


def torch_environment() -> dict[str, str]:
    """For the interpreter that has torch; what the client needs besides comes after its own."""
    paths = [*(p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p), str(ROOT), str(ROOT / "operator")]
    paths.append(str(Path(httpx.__file__).parents[1]))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "4"}


def interpreter(cpu: bool) -> str:
    if not cpu:
        return sys.executable
    from e2e.sglang_cpu import environment

    return str(environment.interpreter())


class Bench:
    """The trainer, the engine's pod and its streams; a second pod where there is one."""

    def __init__(self, work: Path, out: Path, *, shape: str, cpu: bool, streams: int) -> None:
        self.work, self.out = work, out
        self.shape, self.cpu = shape, cpu
        self.size = total_bytes(shape)
        self._count = streams
        self._serial = 0
        self.boot = WeightVersion("v1", str(work / "v1"))
        self.pods: list[LocalPod] = []
        self.trainer: TrainerProcess | None = None
        self._streams: DecodeStreams | None = None
        self._checksums: dict[str, str] = {}
        self.serves = "v1"

    @property
    def pod(self) -> LocalPod:
        return self.pods[0]

    @property
    def streams(self) -> DecodeStreams:
        assert self._streams is not None
        return self._streams

    # --- processes ---

    async def start(self, *, second: bool, bare: Callable[[bool], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        begin = time.monotonic()
        await asyncio.to_thread(self._write_checkpoint)
        found: dict[str, Any] = {"checkpoint written, s": round(time.monotonic() - begin, 1)}
        # Before anything else is on the GPUs, and while the engines import their packages.
        self.pods = [self._new_pod("engine-0", "1,0")]
        if second:
            self.pods.append(self._new_pod("engine-1", "0,1"))
        for one in self.pods:
            one.start_agent()
            one.start_launcher()
        found["bare"] = await bare(self.cpu)
        await self.start_trainer()
        for one in self.pods:
            await one.put(one.desired(peer_key=PEER_KEY))
        await asyncio.gather(*(one.serving() for one in self.pods))
        found["all serve, s"] = round(time.monotonic() - begin, 1)
        found["SGLang"] = (await self.pod.report()).engine.sglang_version
        self._checksums["v1"] = await self.checksum(self.pod)
        await self._begin_streams()
        found["decode, tok/s"] = round(await asyncio.to_thread(self.streams.rate, 3.0))
        found["memory"] = await asyncio.to_thread(memory)
        return found

    async def start_trainer(self) -> None:
        self.trainer = TrainerProcess(self.shape, self.cpu, self.out / "trainer.log")
        async with asyncio.timeout(90):
            await self.trainer.ready()

    async def start_tp2(self) -> dict[str, Any]:
        await self._stop_pods()
        begin = time.monotonic()
        self.pods = [self._new_pod("engine-tp2", "0,1", tp=2)]
        self.pod.start_agent()
        self.pod.start_launcher()
        await self.pod.put(self.pod.desired(peer_key=PEER_KEY))
        await self.pod.serving()
        self.serves = "v1"
        self._checksums = {"v1": await self.checksum(self.pod)}
        await self._begin_streams()
        return {
            "serves, s": round(time.monotonic() - begin, 1),
            "decode, tok/s": round(await asyncio.to_thread(self.streams.rate, 3.0)),
            "memory": await asyncio.to_thread(memory),
        }

    async def stop(self) -> None:
        if self.trainer is not None:
            self.trainer.kill()
        await self._stop_pods()

    async def _stop_pods(self) -> None:
        if self._streams is not None:
            self._streams.__exit__(None, None, None)
            self._streams = None
        for one in self.pods:
            for log in ("agent.log", "engine.log"):
                if (one.folder / log).exists():
                    (self.out / f"{one.folder.name}-{log}").write_bytes((one.folder / log).read_bytes()[-4_000_000:])
            await one.stop()
        self.pods = []

    async def _begin_streams(self) -> None:
        self._streams = DecodeStreams(self.pod.url, self._count, self.pod.record.data_key)
        self._streams.__enter__()
        await asyncio.to_thread(self.streams.wait_begun, 0.0, 120.0)
        await asyncio.sleep(3.0)

    def _write_checkpoint(self) -> None:
        words = [self.boot.path, self.shape, "1", "cpu" if self.cpu else "cuda"]
        subprocess.run(
            [interpreter(self.cpu), "-m", "bench.gpu.models", *words], env=torch_environment(), check=True, timeout=120
        )

    def _new_pod(self, name: str, gpus: str, tp: int = 1) -> LocalPod:
        folder = self.work / name
        if self.cpu:
            return LocalPod(folder, self.boot, staged_versions=2)
        return GpuPod(folder, self.boot, gpus=gpus, tp=tp, name=name)

    # --- what steps are made of ---

    async def engine_post(self, path: str, body: object) -> str:
        status, text = await self.pod.engine_call("POST", path, body, self.pod.record.admin_key)
        assert status == 200, f"{path} answered {status}: {text[:300]}"
        return text

    async def checksum(self, one: LocalPod) -> str:
        """SGLang's own, over all parameters; takes seconds."""
        status, text = await one.engine_call("POST", "/weights_checker", {"action": "checksum"}, one.record.admin_key)
        assert status == 200, text[:300]
        answer = json.loads(text)
        return str(answer.get("per_engine_checksum") or [rank["per_gpu_checksum"] for rank in answer["ranks"]])

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
        one = one or self.pod
        await one.put(one.desired(move=wanted, peer_key=PEER_KEY))
        return await one.until(lambda report: settled(wanted, report), MOVE_SECONDS)

    async def final(self) -> dict[str, Any]:
        """A whole version once more, and SGLang's checksum of it against the one that it loaded from disk itself."""
        row = await committed(self, "Auto", 512 << 20 if not self.cpu else 1 << 18, PauseMode.RETRACT, "v1")
        row["checksum as loaded from disk"] = await self.checksum(self.pod) == self._checksums["v1"]
        return row


def settled(wanted: WeightMove, report: AgentReport) -> bool:
    found = report.move
    return found is not None and found.id == wanted.id and (found.reached >= wanted.until or found.error != "")


def memory() -> dict[str, str]:
    from .memory import processes

    try:
        return processes()
    except OSError:
        return {}


# --- steps ---


async def transfer(bench: Bench, transport: str, bucket_bytes: int) -> dict[str, Any]:
    """Into the stage, while the engine decodes; nothing is committed."""
    assert bench.trainer is not None
    label = bench.label()
    await bench.begin_alike()
    words = {"mode": "staged", "version": label, "of": bench.other(), "transport": transport}
    bench.trainer.order(**words, bucket_bytes=bucket_bytes)
    await bench.trainer.said("sending", label)
    begin = time.monotonic()
    report = await bench.make(bench.move(label, Step.PREPARE, transport=transport))
    end = time.monotonic()
    assert report.move is not None
    sent = await bench.trainer.done(label, waits=not report.move.error)
    row: dict[str, Any] = {"transport": transport, "bucket MiB": bucket_bytes / (1 << 20)}
    if report.move.error or "error" in sent:
        return row | {"error": report.move.error, "sender": sent.get("error", "")}
    seen = await asyncio.to_thread(bench.streams.around, begin, end)
    return row | {
        "used": sent["transport"],
        "sent, s": round(sent["seconds"], 4),
        "GB/s": round(sent["size"] / 1e9 / sent["seconds"], 1),
        "order to staged, s": round(end - begin, 4),
        "decode lost, ms": round(seen.lost * 1e3, 1),
        "longest token gap, ms": round(seen.gap * 1e3, 1),
        "decode, tok/s": round(seen.rate),
    }


async def transfers(
    bench: Bench, transports: Sequence[str], sizes: Sequence[int], repeats: int
) -> list[dict[str, Any]]:
    rows = []
    for transport in transports:
        for size in sizes:
            for _ in range(repeats):
                rows.append(await transfer(bench, transport, size))
                print(json.dumps(rows[-1]), flush=True)
    return rows


async def committed(bench: Bench, transport: str, size: int, mode: PauseMode, of: str = "") -> dict[str, Any]:
    """From the order to the new version being served, wire and commit; as one move, without an operator's barriers."""
    assert bench.trainer is not None
    of = of or bench.other()
    label = bench.label()
    await bench.begin_alike()
    bench.trainer.order(mode="staged", version=label, of=of, transport=transport, bucket_bytes=size)
    await bench.trainer.said("sending", label)
    begin = time.monotonic()
    report = await bench.make(bench.move(label, Step.CONTINUE, transport=transport, pause_mode=mode))
    end = time.monotonic()
    assert report.move is not None
    sent = await bench.trainer.done(label, waits=not report.move.error)
    if report.move.error:
        return {"mode": str(mode), "error": report.move.error, "sender": sent.get("error", "")}
    bench.serves = of
    seen = await asyncio.to_thread(bench.streams.around, begin, end)
    assert report.engine.weight_version == label, report.engine
    return {
        "mode": str(mode),
        "used": sent.get("transport", ""),
        "pause to continue, ms": round(report.move.stall_seconds * 1e3, 1),
        "order to serving, s": round(end - begin, 4),
        "sent, s": round(sent.get("seconds", 0.0), 4),
        "decode lost, ms": round(seen.lost * 1e3, 1),
        "longest token gap, ms": round(seen.gap * 1e3, 1),
    }


async def commits(bench: Bench, size: int, repeats: int) -> dict[str, Any]:
    rows = []
    for _ in range(repeats):
        for mode in (PauseMode.IN_PLACE, PauseMode.RETRACT):
            rows.append(await committed(bench, "Auto", size, mode))
            print(json.dumps(rows[-1]), flush=True)
    medians = {
        mode: median(row["pause to continue, ms"] for row in rows if row["mode"] == mode and "error" not in row)
        for mode in {row["mode"] for row in rows if "error" not in row}
    }
    return {"rows": rows, "pause to continue, ms, medians": medians}


async def direct(bench: Bench, sizes: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Into the paused engine by SGLang's own group, through our transaction."""
    assert bench.trainer is not None
    rows = []
    for size in sizes:
        for _ in range(repeats):
            of, label = bench.other(), bench.label()
            await bench.begin_alike()
            bench.trainer.order(mode="direct", version=label, of=of, bucket_bytes=size)
            await bench.trainer.said("serving", label)
            begin = time.monotonic()
            wanted = bench.move(label, Step.CONTINUE, SourceKind.DIRECT, pause_mode=PauseMode.RETRACT)
            report = await bench.make(wanted)
            end = time.monotonic()
            bench.trainer.order(mode="over", version=label)
            sent = await bench.trainer.done(label)
            assert report.move is not None
            row: dict[str, Any] = {"bucket MiB": size / (1 << 20), "error": report.move.error or sent.get("error", "")}
            if not row["error"]:
                bench.serves = of
                seen = await asyncio.to_thread(bench.streams.around, begin, end)
                row |= {
                    "pause to continue, ms": round(report.move.stall_seconds * 1e3, 1),
                    "order to serving, s": round(end - begin, 3),
                    "decode lost, ms": round(seen.lost * 1e3, 1),
                    "longest token gap, ms": round(seen.gap * 1e3, 1),
                }
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


async def peer_catch_up(bench: Bench) -> dict[str, Any]:
    """The second engine gets what the first serves from the first one's agent, while the first decodes."""
    first, other = bench.pods
    report = await first.report()
    root, label = report.engine.weights_root, report.engine.weight_version
    await bench.begin_alike()
    begin = time.monotonic()
    wanted = bench.move(label, Step.CONTINUE, SourceKind.KEPT, root=root, senders=[], peers=[_address(first)])
    found = await bench.make(wanted, other)
    end = time.monotonic()
    assert found.move is not None
    seen = await asyncio.to_thread(bench.streams.around, begin, end)
    return {
        "error": found.move.error,
        "order to serving, s": round(end - begin, 2),
        "GB/s": round(bench.size / 1e9 / (end - begin), 2),
        "pause to continue, ms": round(found.move.stall_seconds * 1e3, 1),
        "decode lost by the giver, ms": round(seen.lost * 1e3, 1),
        "roots equal": found.engine.weights_root == root,
        "checksums equal": await bench.checksum(first) == await bench.checksum(other),
    }


def _address(one: LocalPod) -> str:
    return f"{one.address}:{one.agent_port}"
