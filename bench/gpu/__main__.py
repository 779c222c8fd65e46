"""python -m bench.gpu: prepares, measures, writes results.json and table.md into --out after every step."""

from __future__ import annotations

import json
import platform
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from .checker import compare_every_path
from .commits import Commits
from .engine import Engine
from .events import Events
from .faults import damaged_stage, engine_killed, holder_killed, wrong_digest
from .memory import processes, release_and_resume, used_gibibytes
from .preparation import VERSIONS, Prepared, checkpoint, device_holder, make_folders, prepare
from .settings import Settings, read_settings
from .sglang_own import SGLangOwn
from .streams import DecodeStreams
from .table import table

Holder = subprocess.Popen[bytes] | None


class Results:
    """Kept on disk after every step: a run that is cut off has not been for nothing."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self.facts: dict[str, Any] = {"python": platform.python_version(), "arguments": sys.argv[1:]}
        self.rows: list[dict[str, Any]] = []
        self.failed: list[str] = []
        self._begin = time.monotonic()

    def step(self, name: str, call: Callable[[], Any]) -> None:
        """A failure is noted and the next step tried."""
        print(f"--- {name} (at {time.monotonic() - self._begin:.0f} s)", flush=True)
        try:
            found = call()
        except Exception:
            self.failed.append(name)
            self.facts[f"{name}: failed"] = traceback.format_exc()[-2000:]
            traceback.print_exc()
        else:
            if found is not None:
                self.facts[name] = found
                print(json.dumps(found), flush=True)
        self.write()

    def write(self) -> None:
        text = json.dumps({"facts": self.facts, "rows": self.rows}, indent=1)
        (self._out / "results.json").write_text(text)
        (self._out / "table.md").write_text(table(self.rows))


def main() -> int:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the engine must not be left behind
    settings = read_settings()
    make_folders(settings)
    results = Results(settings.out)
    if not settings.cpu:
        results.facts["GiB used before anything, this process's CUDA context included"] = used_gibibytes()
    try:
        with device_holder(settings, results.facts) as holder, Engine(settings, checkpoint(settings, "v1")) as engine:
            prepared = prepare(settings, results.facts)
            results.facts["engine start after preparation, s"] = round(engine.wait_healthy(), 1)
            results.facts["SGLang"] = engine.version
            _machine(settings, results.facts)
            _measure(settings, results, engine, prepared, holder)
    finally:
        results.write()
        shutil.rmtree(settings.work, ignore_errors=True)
    print(table(results.rows))
    print("failed: " + (", ".join(results.failed) or "nothing"))
    return 1 if results.failed or any("DIFFER" in row["verified"] for row in results.rows) else 0


def _measure(settings: Settings, results: Results, engine: Engine, prepared: Prepared, holder: Holder) -> None:
    with DecodeStreams(settings.url, settings.streams) as streams:
        events = Events(engine, streams, prepared.size)
        commits = Commits(settings, engine, events, prepared)
        own = SGLangOwn(settings, commits)

        def step(name: str, call: Callable[[], Any]) -> None:
            def kept() -> Any:
                try:
                    return call()
                finally:
                    results.rows = [asdict(row) for row in events.rows]

            results.step(name, kept)

        step("first tokens", lambda: _warm_up(engine, streams))
        if settings.lean:
            step("pause and continue", commits.baseline)
            step("staged on both", commits.one_version_each)
        else:
            step("pause and continue", commits.baseline)
            for medium in prepared.media:
                step(f"staged on {medium}", partial(commits.staged, medium))
            step("with a check, without sums", partial(commits.variants, prepared.media[0]))
            step("wrong digest under load", commits.refused)
            step("read beside decoding", lambda: commits.read_beside_decoding(streams))
            step("SGLang: from disk", own.disk)
            if not settings.cpu:
                step("SGLang: CUDA IPC", own.colocated)
        step("requests that failed", streams.failed)
    engine.post("/abort_request", {"rid": "", "abort_all": True})
    time.sleep(1.0)
    _idle(settings, results, commits, holder)


def _idle(settings: Settings, results: Results, commits: Commits, holder: Holder) -> None:
    """Without running requests. The last steps end what the others need."""
    step = results.step
    if not settings.cpu:
        step("memory by process", processes)
    step("wrong digest", lambda: wrong_digest(commits))
    if not settings.cpu and not settings.lean:
        step("weights_checker", lambda: compare_every_path(commits, own=True))
    if not settings.cpu:
        step("release and resume", lambda: release_and_resume(commits, VERSIONS[0]))
    if settings.lean:
        return
    step("damaged stage", lambda: damaged_stage(commits))
    step("engine killed in mid-load", lambda: engine_killed(commits, 0.0 if settings.cpu else 0.12))
    if holder is not None:
        step("holder killed", partial(holder_killed, commits, holder))


def _warm_up(engine: Engine, streams: DecodeStreams) -> dict[str, Any]:
    """Kernels are compiled for what comes first, and prefixes of running requests are computed at the first retract."""
    streams.wait_begun(0.0, 240.0)
    time.sleep(2.0)
    for mode in ("retract", "in_place"):
        engine.post("/pause_generation", {"mode": mode})
        engine.post("/continue_generation")
        time.sleep(2.0)
    return {"decode, tok/s": round(streams.rate(2.0))}


def _machine(settings: Settings, facts: dict[str, Any]) -> None:
    if settings.cpu:
        return
    import torch

    facts["GPU"] = torch.cuda.get_device_name()
    facts["torch"] = torch.__version__
    facts["GiB used at the beginning"] = used_gibibytes()


if __name__ == "__main__":
    sys.exit(main())
