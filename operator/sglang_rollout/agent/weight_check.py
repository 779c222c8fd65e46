"""What SGLang's /weights_checker says, read: one status, 400, stands for tensors that differ, for a check that this
device cannot do, and for a broken one; the message tells them apart (srt/utils/weight_checker.py)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from sglang_rollout.protocol.operations import OperationKind, OperationReport, OperationResult

ACTIONS = {
    OperationKind.SNAPSHOT: "snapshot",
    OperationKind.RESET: "reset_tensors",
    OperationKind.COMPARE: "compare",
    OperationKind.CHECKSUM: "checksum",
}
MAX_NAMES = 10
MAX_MESSAGE = 400

_DIFFER = "check tensor equality failed"
_NAME = re.compile(r"^name=(\S+) ", re.MULTILINE)
# The comparator moves both sides to the GPU.
_CANNOT = ("Torch not compiled with CUDA enabled", "No CUDA GPUs are available", "Found no NVIDIA driver")
_UNKNOWN_ACTION = "Unsupported action"
_PLACEMENT = ("role", "tp_rank", "tp_size", "dp_rank", "dp_size", "pp_rank", "pp_size", "size")


def judge(operation_id: str, kind: OperationKind, status: int, text: str, weight_version: str) -> OperationReport:
    """The report of a check that the engine has answered."""
    body = _object(text)
    message = str(body.get("message", text))

    def report(result: OperationResult, said: str = "", **more: Any) -> OperationReport:
        return OperationReport(operation_id, result, _short(said), weight_version=weight_version, **more)

    if status == 200 and body.get("success") is True:
        if kind is not OperationKind.CHECKSUM:
            return report(OperationResult.PASSED)
        checksum = str(body.get("per_engine_checksum") or "")
        if not checksum:
            return report(OperationResult.ERROR, f"the answer holds no checksum: {text}")
        return report(OperationResult.PASSED, checksum=checksum, sharding=sharding(body.get("ranks") or []))
    if _DIFFER in message:
        # Each rank of the engine names its part of a tensor: once is enough.
        names = sorted(set(_NAME.findall(message)))
        said = f"{len(names)} tensors differ from the snapshot"
        return report(OperationResult.MISMATCH, said, tensors=names[:MAX_NAMES], differing=len(names))
    if cannot := next((reason for reason in _CANNOT if reason in message), ""):
        return report(OperationResult.UNSUPPORTED, f"{kind.value} needs a GPU here: {cannot}")
    if _UNKNOWN_ACTION in message or status in (404, 405):
        return report(OperationResult.UNSUPPORTED, f"this SGLang has no such check: {message}")
    if kind is OperationKind.COMPARE and status == 400 and not message.strip():
        return report(OperationResult.ERROR, "this engine process has no snapshot to compare with: take one first")
    return report(OperationResult.ERROR, f"/weights_checker answered {status}: {message}")


def sharding(ranks: list[Any]) -> str:
    """The layout of the ranks as one string: engines with equal ones hold equal parts and so have equal checksums.
    A rank tells one placement (0.5.17) or one for each model that it holds, drafts included (0.5.23)."""
    placements = []
    for rank in ranks:
        told = rank.get("parallelism_info") if isinstance(rank, Mapping) else None
        for info in told if isinstance(told, list) else [told]:
            known = info if isinstance(info, Mapping) else {}
            placements.append(",".join(f"{key}={known[key]}" for key in _PLACEMENT if key in known))
    return ";".join(sorted(placements))


def _object(text: str) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_MESSAGE else line[: MAX_MESSAGE - 1] + "…"
