"""GPU memory: who holds how much, and what releasing and resuming the engine's gives back."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

from sglang_rollout.transfer.hook_call import Action

from .commits import Commits
from .engine import Engine


def used_gibibytes() -> float:
    import torch

    free, total = torch.cuda.mem_get_info()
    return round(float(total - free) / 2**30, 2)


def processes() -> dict[str, str]:
    """GPU memory by process, as nvidia-smi tells (in some virtual machines it does not), and their host memory."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
    told = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False).stdout
    found: dict[str, str] = {}
    for line in told.splitlines():
        pid, _, used = line.partition(", ")
        found[_command(pid)] = f"GPU {used}, RSS {_resident_mib(pid)} MiB"
    return found


def _command(pid: str) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return f"process {pid}"
    return f"{' '.join(words)[:60]} ({pid})"


def _resident_mib(pid: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) >> 10 for line in lines if line.startswith("VmRSS")), 0)


def release_and_resume(commits: Commits, version: str) -> dict[str, Any]:
    """With nothing running. Weights come back empty and are loaded again from the stage."""
    engine, root = commits.engine, commits.prepared.roots[version]
    commits.register("device")
    _load(engine, root, version)
    found: dict[str, Any] = {"checksum before": engine.checksum(), "GiB before": used_gibibytes()}
    steps = (
        ("release", ["kv_cache", "cuda_graph"]),
        ("release", ["weights"]),
        ("resume", ["weights"]),
        ("resume", ["kv_cache", "cuda_graph"]),
    )
    for action, tags in steps:
        begin = time.monotonic()
        engine.post(f"/{action}_memory_occupation", {"tags": tags})
        words = f"{action} {'+'.join(tags)}"
        found[f"{words}, ms"] = round((time.monotonic() - begin) * 1e3, 1)
        time.sleep(0.5)
        found[f"{words}, GiB after"] = used_gibibytes()
    begin = time.monotonic()
    found["load again"] = _load(engine, root, version)
    found["load again, ms"] = round((time.monotonic() - begin) * 1e3, 1)
    found["checksum after"] = engine.checksum()
    found["checksums equal"] = found["checksum after"] == found["checksum before"]
    found["generates"] = generates(engine)
    return found


def _load(engine: Engine, root: str, version: str) -> str:
    report = engine.hook_in_session(Action.APPLY, root, version)
    return report.problem or report.compared


def generates(engine: Engine) -> int:
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}}
    return len(engine.post("/generate", body)["output_ids"])
