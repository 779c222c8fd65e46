"""How long one real engine on CPU generates nothing while it moves to other weights: from the stage, and by SGLang's
own ways with the same bytes in the same run."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from e2e.agent.local_pod import LocalPod
from e2e.sglang_cpu import environment, models
from e2e.sglang_cpu.models import WRITER
from sglang_rollout.protocol.report import AgentReport
from sglang_rollout.protocol.weights import Source, SourceKind, Step, WeightMove, WeightVersion
from sglang_rollout.transfer.hook_report import FOLDER, report_from

from . import page_cache
from .wire import ROOT

MOVE_SECONDS = 600.0
BUCKET_BYTES = 64 << 20
READ_BYTES = 8 << 20


@dataclass(frozen=True)
class CommitFigure:
    """Medians of pause to continue, in seconds. staged: check, copy, sums of all parameters, label and its read-back.
    distributed: SGLang's update_weights_from_distributed, driven by our agent. disk_cached and disk: SGLang's
    update_weights_from_disk between its own pause and continue, of files that are in the machine's memory, and of files
    that are not, as those that another machine has just written. read: such files, read once from end to end. parts: of
    staged, what the weight loader spent on what."""

    size: int
    staged: float
    distributed: float
    disk_cached: float
    disk: float
    read: float
    parts: dict[str, float]

    def to_object(self) -> dict[str, Any]:
        return asdict(self)


async def measure(hidden: int, layers: int, repeats: int) -> CommitFigure:
    """Of a Qwen3 of these dimensions."""
    folder = Path(tempfile.mkdtemp(prefix="bench-commits-"))
    try:
        paths = [_write(folder / f"model-{seed}", seed, hidden, layers) for seed in (1, 2)]
        local = LocalPod(folder / "pod", WeightVersion("boot", str(paths[0])), staged_versions=2)
        local.start_agent()
        local.start_launcher()
        try:
            await local.serving()
            parts: list[dict[str, float]] = []
            staged = [await _staged(local, paths, turn, parts) for turn in range(repeats + 1)][1:]
            distributed = [seconds async for seconds in _direct(local, paths, repeats + 1)][1:]
            cached = [await _from_disk(local, paths, turn) for turn in range(repeats + 1)][1:]
            disk = [await _from_disk(local, paths, turn, cold=True) for turn in range(repeats + 1)][1:]
            read = [_read(path) for path in paths]
        finally:
            await local.stop()
        size = sum(file.stat().st_size for file in _files(paths[0]))
        middle = statistics.median
        spent = {name: middle(one[name] for one in parts[1:]) for name in parts[-1]}
        return CommitFigure(
            size, middle(staged), middle(distributed), middle(cached), middle(disk), middle(read), spent
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write(folder: Path, seed: int, hidden: int, layers: int) -> Path:
    if (hidden, layers) == (128, 2):
        return models.path(f"qwen3-v{seed}")
    folder.mkdir()
    words = ["--architecture", "qwen3", "--seed", str(seed), "--hidden", str(hidden), "--layers", str(layers)]
    subprocess.run([str(environment.interpreter()), str(WRITER), str(folder), *words], check=True)
    return folder


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _read(folder: Path) -> float:
    """Seconds."""
    page_cache.drop(_files(folder))
    begin = time.monotonic()
    for path in _files(folder):
        with path.open("rb", buffering=0) as file:
            while file.read(READ_BYTES):
                pass
    return time.monotonic() - begin


async def _staged(local: LocalPod, paths: list[Path], turn: int, parts: list[dict[str, float]]) -> float:
    weights = WeightVersion(f"staged-{turn}", str(paths[1 - turn % 2]))
    move = WeightMove(f"staged-{turn}", weights, Step.CONTINUE, timeout_seconds=MOVE_SECONDS)
    seconds = await _stall(local, move)
    (written,) = (local.stage_folder / FOLDER).glob("*.json")
    report = report_from(json.loads(written.read_bytes()))
    assert (report.action, report.version) == ("apply", weights.version), report
    parts.append(report.seconds)
    return seconds


async def _direct(local: LocalPod, paths: list[Path], count: int) -> AsyncIterator[float]:
    versions = {f"direct-{turn}": str(paths[1 - turn % 2]) for turn in range(count)}
    orders = {"versions": versions, "mode": "direct", "bucket_bytes": BUCKET_BYTES, "seconds": MOVE_SECONDS}
    async with _trainer(orders) as trainer:
        for label in versions:
            source = Source(SourceKind.DIRECT, [f"127.0.0.1:{await _word(trainer, 'port')}"], members=1)
            move = WeightMove(
                label, WeightVersion(label, ""), Step.CONTINUE, timeout_seconds=MOVE_SECONDS, source=source
            )
            yield await _stall(local, move)
            assert trainer.stdin is not None
            trainer.stdin.write(b"\n")
            await _word(trainer, "done")


async def _from_disk(local: LocalPod, paths: list[Path], turn: int, *, cold: bool = False) -> float:
    """The agent is told nothing of it: it only looks on."""
    if cold:
        page_cache.drop(_files(paths[turn % 2]))

    async def call(method: str, route: str, **body: Any) -> str:
        posted = method == "POST"
        key = local.record.admin_key if posted else local.record.data_key
        status, text = await local.engine_call(method, route, body if posted else None, key)
        assert status == 200, text
        return text

    label = f"disk-{'cold' if cold else 'cached'}-{turn}"
    begin = time.monotonic()
    await call("POST", "/pause_generation", mode="retract")
    await call("POST", "/flush_cache")
    done = await call("POST", "/update_weights_from_disk", model_path=str(paths[turn % 2]), weight_version=label)
    await call("POST", "/continue_generation")
    seconds = time.monotonic() - begin
    assert json.loads(done)["success"], done
    assert json.loads(await call("GET", "/model_info"))["weight_version"] == label
    return seconds


async def _stall(local: LocalPod, move: WeightMove) -> float:
    def over(report: AgentReport) -> bool:
        now = report.move
        return now is not None and now.id == move.id and (now.reached >= move.until or now.error != "")

    await local.put(local.desired(move=move))
    report = await local.until(over, MOVE_SECONDS)
    assert report.move is not None
    assert not report.move.error, report.move.error
    return report.move.stall_seconds


@asynccontextmanager
async def _trainer(orders: dict[str, Any]) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        str(environment.interpreter()), "-m", "e2e.agent.live_trainer", json.dumps(orders),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'operator'}:{ROOT}", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _word(process: asyncio.subprocess.Process, word: str) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(MOVE_SECONDS):
        while line := (await process.stdout.readline()).decode():
            if line.startswith(f"{word} "):
                return line.removeprefix(word).strip()
    raise AssertionError("the trainer ended")
