"""What is left when something dies or lies in the middle of a commit: whether the engine tells, and whether the same
weights come in again."""

from __future__ import annotations

import subprocess
import threading
import time
from contextlib import suppress
from typing import Any

from sglang_rollout.transfer.hook_call import Action

from .commits import AS_AGENTS, Commits, commit
from .engine import Engine, EngineFailed
from .memory import generates, used_gibibytes
from .preparation import VERSIONS, read_into, use_medium

BITS_FLIPPED = 16  # bytes


def damaged_stage(commits: Commits) -> dict[str, Any]:
    """Bytes of the host stage change after they were sealed: the sums after the copy must tell. Then the version is
    staged again and loaded again."""
    engine, prepared, settings = commits.engine, commits.prepared, commits.settings
    commits.register("host")
    slot = prepared.host.slots[-1]
    assert slot.sealed is not None
    version = slot.sealed.version
    before = _load(engine, prepared.roots[version], version)
    right = engine.hook_in_session(Action.SUMS).sums_digest
    file = settings.work / "host" / slot.regions[0].path
    with file.open("r+b") as stage:
        stage.seek(slot.regions[0].size // 3)
        held = stage.read(BITS_FLIPPED)
        stage.seek(-BITS_FLIPPED, 1)
        stage.write(bytes(byte ^ 0x01 for byte in held))
    damaged = engine.hook_in_session(Action.APPLY, prepared.roots[version], version)
    read_into(settings, prepared.host, slot.name, version)
    again = _load(engine, prepared.roots[version], version)
    return {
        "before": before,
        "damaged": damaged.problem or "NOT NOTICED",
        "the engine is mixed": damaged.written,
        "staged and loaded again": again,
        "sums right": engine.hook_in_session(Action.SUMS).sums_digest == right,
    }


def wrong_digest(commits: Commits) -> dict[str, Any]:
    """Nothing is written, and the right digest is taken at once."""
    engine, prepared = commits.engine, commits.prepared
    medium = prepared.media[0]
    commits.register(medium)
    version = prepared.versions(medium)[0]
    _load(engine, prepared.roots[version], version)
    sums = engine.hook_in_session(Action.SUMS).sums_digest
    refused = engine.hook_in_session(Action.APPLY, "0" * 64, version)
    return {
        "said": refused.problem,
        "nothing written": not refused.written,
        "sums as before": engine.hook_in_session(Action.SUMS).sums_digest == sums,
        "the right one after it": _load(engine, prepared.roots[version], version),
    }


def engine_killed(commits: Commits, delay: float) -> dict[str, Any]:
    """SIGKILL to all of the engine `delay` seconds into a load from host memory; it starts again with random bytes,
    and the stage, which outlived it, is loaded."""
    engine, prepared = commits.engine, commits.prepared
    commits.register("host")
    version = prepared.versions("host")[-1]
    _load(engine, prepared.roots[version], version)
    checksum = engine.checksum()
    answers: list[str] = []

    def apply() -> None:
        try:
            commit(engine, prepared.roots[version], version, AS_AGENTS, {})
            answers.append("the load was over before the kill")
        except (OSError, EngineFailed, RuntimeError, ValueError) as error:
            answers.append(f"{type(error).__name__}: {str(error)[:200]}")

    call = threading.Thread(target=apply)
    call.start()
    time.sleep(delay)
    killed = time.monotonic()
    engine.kill()
    call.join(30)
    found: dict[str, Any] = {"the call that was under way": answers, "noticed, s": round(time.monotonic() - killed, 3)}
    engine.start()
    found["started again, s"] = round(engine.wait_healthy(), 1)
    begin = time.monotonic()
    commits.registered.clear()
    for medium in reversed(prepared.media):
        use_medium(commits.settings, medium)
        engine.hook_in_session(Action.REGISTER)
    found["registered again, s"] = round(time.monotonic() - begin, 2)
    begin = time.monotonic()
    found["loaded again"] = _load(engine, prepared.roots[version], version)
    found["loaded again, s"] = round(time.monotonic() - begin, 3)
    found["checksum equal"] = engine.checksum() == checksum
    found["generates"] = generates(engine)
    return found


def holder_killed(commits: Commits, holder: subprocess.Popen[bytes]) -> dict[str, Any]:
    """The process that owns the staged GPU memory dies; the engine has it mapped."""
    commits.register("device")
    use_medium(commits.settings, "device")
    holder.kill()
    with suppress(subprocess.TimeoutExpired):
        holder.wait(30)
    time.sleep(1.0)
    version = VERSIONS[1]
    return {
        "GiB after the kill": used_gibibytes(),
        "load from what it held": _load(commits.engine, commits.prepared.roots[version], version),
        "generates": generates(commits.engine),
    }


def _load(engine: Engine, root: str, version: str) -> str:
    report = engine.hook_in_session(Action.APPLY, root, version)
    return report.problem or report.compared
