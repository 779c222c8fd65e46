"""python -m bench.gpu: prepares, measures, writes results.json and table.md into --out after every step."""

from __future__ import annotations

import json
import platform
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from sglang_rollout.engine.loader.mapped import MappedStage
from sglang_rollout.transfer.stage_index import read_index, read_manifest

from .engine import Engine
from .measurements import Measurements
from .memory import holder_killed, release_and_resume, used_gibibytes
from .preparation import VERSIONS, checkpoint, device_holder, make_folders, prepare, use_medium
from .settings import Settings, read_settings
from .streams import DecodeStreams
from .table import table


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
    settings = read_settings()
    make_folders(settings)
    results = Results(settings.out)
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


def _measure(settings: Settings, results: Results, engine: Engine, prepared: Any, holder: Any) -> None:
    with DecodeStreams(settings.url, settings.streams) as streams:
        measured = Measurements(settings, engine, streams, prepared)

        def step(name: str, call: Callable[[], Any]) -> None:
            def kept() -> Any:
                try:
                    return call()
                finally:
                    results.rows = measured.table()

            results.step(name, kept)

        time.sleep(8.0)
        step("baseline", measured.baseline)
        results.facts["decode, tok/s"] = round(measured.base)
        if not settings.cpu:
            step("staged on device", lambda: measured.staged("device"))
        step("staged on host", lambda: measured.staged("host"))
        step("wrong digest", measured.refused)
        step("read beside decoding", measured.read_beside_decoding)
        step("SGLang: from disk", measured.disk)
        if not settings.cpu:
            step("SGLang: CUDA IPC", lambda: measured.colocated(partial(_tensors, _mapped(settings))))
        step("requests that failed", lambda: streams.stamps(0, 0)[1])
    time.sleep(3.0)
    if settings.cpu:
        results.step("checksum", engine.checksum)
        return
    use_medium(settings, "device")
    version = VERSIONS[0]
    results.step("release and resume", lambda: release_and_resume(engine, prepared, version))
    results.step("holder killed", lambda: holder_killed(engine, prepared, VERSIONS[1], holder))


def _mapped(settings: Settings) -> MappedStage:
    """The device stage in this process, which stands for a trainer's."""
    import torch

    mapped = MappedStage(settings.work / "device", torch.device("cuda:0"))
    for slot in read_index(mapped.folder).slots:
        mapped.map(slot, pin=False)
    return mapped


def _tensors(mapped: MappedStage, version: str) -> list[tuple[str, Any]]:
    slots = read_index(mapped.folder).slots
    slot = next(slot for slot in slots if slot.sealed is not None and slot.sealed.version == version)
    return list(mapped.tensors(slot, read_manifest(mapped.folder, slot)))


def _machine(settings: Settings, facts: dict[str, Any]) -> None:
    if settings.cpu:
        return
    import torch

    facts["GPU"] = torch.cuda.get_device_name()
    facts["torch"] = torch.__version__
    facts["GiB used at the beginning"] = used_gibibytes()


if __name__ == "__main__":
    sys.exit(main())
