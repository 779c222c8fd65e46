"""Releasing and resuming the engine's memory, and what the loader does with weights that were thrown away."""

from __future__ import annotations

import subprocess
import time
from typing import Any

from sglang_rollout.transfer.hook_call import Action

from .engine import Engine
from .preparation import Prepared


def used_gibibytes() -> float:
    import torch

    free, total = torch.cuda.mem_get_info()
    return round(float(total - free) / 2**30, 2)


def release_and_resume(engine: Engine, prepared: Prepared, version: str) -> dict[str, Any]:
    """With nothing running. Weights come back empty and are loaded again from the stage."""
    root = prepared.roots[version]
    _load(engine, Action.REGISTER)
    _load(engine, Action.APPLY, root, version)
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
    found["load again"] = _load(engine, Action.APPLY, root, version)
    found["load again, ms"] = round((time.monotonic() - begin) * 1e3, 1)
    found["checksum after"] = engine.checksum()
    found["checksums equal"] = found["checksum after"] == found["checksum before"]
    found["generates"] = generates(engine)
    return found


def holder_killed(engine: Engine, prepared: Prepared, version: str, holder: subprocess.Popen[bytes]) -> dict[str, Any]:
    """The process that owns the staged GPU memory dies; the engine has it mapped."""
    _load(engine, Action.REGISTER)
    holder.kill()
    holder.wait(30)
    time.sleep(1.0)
    return {
        "GiB after the kill": used_gibibytes(),
        "load from what it held": _load(engine, Action.APPLY, prepared.roots[version], version),
        "generates": generates(engine),
    }


def _load(engine: Engine, action: Action, root: str = "", version: str = "") -> str:
    engine.begin()
    report = engine.hook(action, root, version)
    engine.end()
    return report.problem or report.compared


def generates(engine: Engine) -> int:
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}}
    return len(engine.post("/generate", body)["output_ids"])
