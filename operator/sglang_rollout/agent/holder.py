"""The process that owns the stage in GPU memory: started when there is none, and left alone by an agent that ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from sglang_rollout.transfer.cuda_driver import gpu_count
from sglang_rollout.transfer.stage_index import INDEX, StageUnusable, read_index, region_bytes

from .settings import StageSettings

HOLDER_FILE = "holder.json"
READY_SECONDS = 60.0
CHUNK = 2 << 20


def reserve_device(folder: Path, size: int, largest: int, settings: StageSettings) -> None:
    """A holder with slots of `size` bytes over the GPUs of the settings, for tensors of at most `largest` bytes. A
    living one with as much is kept. Raises StageUnusable, CudaError."""
    gpus = settings.gpus or tuple(range(gpu_count()))
    # A bucket, and so a tensor, lies whole on one GPU.
    each = region_bytes(size, len(gpus), max(settings.bucket_bytes, largest))
    each = -(-each // CHUNK) * CHUNK
    wanted = {"bytes": each, "slots": settings.versions, "gpus": list(gpus)}
    if _living(folder, wanted):
        return
    folder.mkdir(parents=True, exist_ok=True)
    _end_other(folder)
    (folder / INDEX).unlink(missing_ok=True)
    command = [sys.executable, "-m", "sglang_rollout.transfer.device_holder", "--folder", str(folder)]
    command += ["--slots", str(settings.versions), "--bytes", str(each), "--gpus", ",".join(map(str, gpus))]
    # It keeps both ends of its input, so that never ends, and is of a session of its own: it lives as long as its
    # container does.
    reading, writing = os.pipe()
    process = subprocess.Popen(
        command,
        stdin=reading,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=(writing,),
        start_new_session=True,
        text=True,
    )
    os.close(reading)
    os.close(writing)
    late = threading.Timer(READY_SECONDS, process.kill)
    late.start()
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        ready = process.stdout.readline().strip() == "ready"
        if not ready:
            reason = process.stderr.read().strip()[-400:] or f"no answer within {READY_SECONDS:g} s"
            raise StageUnusable(f"GPU memory could not be reserved: {reason}; lower --mem-fraction-static")
    finally:
        late.cancel()
    (folder / HOLDER_FILE).write_text(json.dumps({"pid": process.pid, "started": _started(process.pid), **wanted}))


def _living(folder: Path, wanted: dict[str, object]) -> bool:
    found = _read(folder)
    if found is None or any(found.get(key) != value for key, value in wanted.items()):
        return False
    try:
        read_index(folder)
    except StageUnusable:
        return False
    return _is_alive(found)


def _end_other(folder: Path) -> None:
    found = _read(folder)
    if found is not None and _is_alive(found):
        os.kill(int(str(found["pid"])), signal.SIGKILL)


def _read(folder: Path) -> dict[str, object] | None:
    try:
        found = json.loads((folder / HOLDER_FILE).read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _is_alive(found: dict[str, object]) -> bool:
    """The very process: its number may have been given to another one since."""
    try:
        return bool(found["started"]) and _started(int(str(found["pid"]))) == found["started"]
    except (KeyError, ValueError):
        return False


def _started(pid: int) -> str:
    """When a process started, in the kernel's ticks; "" when there is none or it has ended."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if words[0] == "Z" else words[19]
