"""SGLang's own weights_checker over each way of moving weights: a snapshot of one version, then for each way random
bytes into every parameter, the version again, and a comparison with the snapshot. Nothing runs meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from .commits import AS_AGENTS, Commits, commit
from .engine import EngineFailed
from .events import Parts
from .preparation import VERSIONS
from .sglang_own import WHOLE, free, pack, serialized, update_from_disk, update_from_tensors

VERSION = VERSIONS[0]


def compare_every_path(commits: Commits, *, own: bool) -> dict[str, Any]:
    """`own`: SGLang's ways, too. Of each way "equal", or what the checker said, and the seconds that it took."""
    engine, prepared = commits.engine, commits.prepared
    ways: dict[str, Callable[[Parts], None]] = {}
    for medium in prepared.media:
        if VERSION in prepared.versions(medium):
            ways[f"staged on {medium}"] = partial(_staged, commits, medium)
    if own:
        ways["SGLang: from disk"] = partial(update_from_disk, engine, commits.settings, VERSION)
    if own and "device" in prepared.media:
        ways["SGLang: CUDA IPC, one bucket"] = partial(_colocated, commits)
    found: dict[str, Any] = {}
    ways[next(iter(ways))]({})
    found["snapshot, s"] = _timed(lambda: engine.checker("snapshot"))
    for name, move in ways.items():
        row: dict[str, Any] = {"reset, s": _timed(lambda: engine.checker("reset_tensors"))}
        if not found.get("compare after a reset"):
            found["compare after a reset"] = "refused" if _compare(commits) != "equal" else "NOT NOTICED"
        row["move, s"] = _timed(partial(move, {}))
        begin = time.monotonic()
        row["compared"] = _compare(commits)
        row["compare, s"] = round(time.monotonic() - begin, 2)
        found[name] = row
    commits.serves = VERSION
    return found


def _compare(commits: Commits) -> str:
    try:
        commits.engine.checker("compare")
    except EngineFailed as error:
        return str(error)[:300]
    return "equal"


def _staged(commits: Commits, medium: str, parts: Parts) -> None:
    commits.register(medium)
    commit(commits.engine, commits.prepared.roots[VERSION], VERSION, AS_AGENTS, parts)


def _colocated(commits: Commits, parts: Parts) -> None:
    packed = pack(commits.settings, VERSION, WHOLE)
    update_from_tensors(commits.engine, serialized(packed), parts)
    packed.clear()
    free()


def _timed(call: Callable[[], Any]) -> float:
    begin = time.monotonic()
    call()
    return round(time.monotonic() - begin, 3)
