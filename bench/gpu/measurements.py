"""The measurements: each moves weights one way under load and proves by sums that they are in."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from sglang_rollout.transfer.hook_call import Action

from .engine import Engine, EngineFailed
from .preparation import VERSIONS, Prepared, checkpoint, read_into, use_medium
from .settings import Settings
from .streams import DecodeStreams

BUCKETS_MIB = (512, 2048, 20000)
RETRACT, IN_PLACE = "retract", "in_place"


@dataclass(frozen=True)
class Row:
    """Seconds. `stall` from the pause's request to the answer of continue. `parts` of it by call."""

    name: str
    mode: str
    stall: float
    gap: float
    lost: float
    gigabytes_per_second: float
    parts: dict[str, float]
    verified: str


class Measurements:
    def __init__(self, settings: Settings, engine: Engine, streams: DecodeStreams, prepared: Prepared) -> None:
        self._settings = settings
        self._engine = engine
        self._streams = streams
        self._prepared = prepared
        self._host = prepared.host
        self._sums: dict[str, str] = {}
        self._serves = ""
        self.base = 0.0
        self.rows: list[Row] = []

    # --- one event under load ---

    def _event(self, name: str, mode: str, body: Callable[[dict[str, float]], None], verify: str = "") -> None:
        """Pause, `body`, continue; then what the streams saw. `verify`: the version that must be in afterwards."""
        time.sleep(1.0)
        parts: dict[str, float] = {}
        begin = time.monotonic()
        self._timed(parts, "pause", lambda: self._engine.post("/pause_generation", {"mode": mode}))
        try:
            body(parts)
        except Exception:
            # Whatever serves now serves no one: let the other measurements have their engine.
            self._engine.end()
            self._engine.post("/continue_generation")
            raise
        self._timed(parts, "continue", lambda: self._engine.post("/continue_generation", {"torch_empty_cache": False}))
        end = time.monotonic()
        time.sleep(self._settings.settle)
        seen = self._streams.around(begin, end, self.base)
        verified = self._verify(verify) if verify else ""
        moved = self._prepared.size / 1e9 / (end - begin) if verify else 0.0
        row = Row(name, mode, end - begin, seen.gap, seen.lost, moved, parts, verified)
        self.rows.append(row)
        print(
            f"{name} {mode}: {row.stall * 1e3:.1f} ms, gap {row.gap * 1e3:.0f} ms, lost {row.lost * 1e3:.0f} ms, "
            f"{moved:.0f} GB/s {verified} " + " ".join(f"{k}={v * 1e3:.1f}" for k, v in parts.items()),
            flush=True,
        )

    @staticmethod
    def _timed(parts: dict[str, float], name: str, call: Callable[[], Any]) -> Any:
        begin = time.monotonic()
        try:
            return call()
        finally:
            parts[name] = parts.get(name, 0.0) + time.monotonic() - begin

    def _verify(self, version: str) -> str:
        """By the sums of the parameters, which must be those of the first time this version was in, and others than
        the other version's."""
        digest = self._engine.outside_pause(Action.SUMS).sums_digest
        known = self._sums.setdefault(version, digest)
        others = {other for held, other in self._sums.items() if held != version}
        return "sums equal" if digest == known and digest not in others else "SUMS DIFFER"

    def _other(self) -> str:
        self._serves = VERSIONS[0] if self._serves == VERSIONS[1] else VERSIONS[1]
        return self._serves

    # --- what is measured ---

    def baseline(self) -> None:
        self.base = self._streams.steady_rate()
        print(f"decode x{self._settings.streams}: {self.base:.0f} tok/s", flush=True)
        for _ in range(self._settings.repeats):
            now = time.monotonic()
            time.sleep(self._settings.settle)
            seen = self._streams.around(now, now, self.base)
            self.rows.append(Row("no event", "", 0.0, seen.gap, seen.lost, 0.0, {}, ""))
        for mode in (RETRACT, IN_PLACE) * self._settings.repeats:
            self._event("pause and continue", mode, lambda parts: None)

    def staged(self, medium: str) -> dict[str, float]:
        """Returns the seconds of mapping and pinning, done once and outside of what is measured."""
        use_medium(self._settings, medium)
        report = self._engine.outside_pause(Action.REGISTER)
        if report.problem:
            raise EngineFailed(f"register: {report.problem}")
        for mode in (RETRACT, IN_PLACE):
            for checked, sums in ((True, True), (False, True), (False, False)):
                name = f"staged on {medium}: {'check, ' if checked else ''}apply{', sums' if sums else ''}"
                for _ in range(self._settings.repeats):
                    self._event(name, mode, partial(self._commit, checked=checked, sums=sums), self._next)
        return report.seconds

    @property
    def _next(self) -> str:
        return VERSIONS[0] if self._serves == VERSIONS[1] else VERSIONS[1]

    def _commit(self, parts: dict[str, float], *, checked: bool, sums: bool) -> None:
        version = self._other()
        root = self._prepared.roots[version]
        self._timed(parts, "begin", self._engine.begin)
        if checked:
            check = self._timed(parts, "check", lambda: self._engine.hook(Action.CHECK, root, version))
            if check.problem:
                raise EngineFailed(f"check: {check.problem}")
            parts |= {f"check/{name}": seconds for name, seconds in check.seconds.items()}
        applied = self._timed(parts, "apply", lambda: self._engine.hook(Action.APPLY, root, version, sums=sums))
        if applied.problem:
            raise EngineFailed(f"apply: {applied.problem}")
        parts |= {f"apply/{name}": seconds for name, seconds in applied.seconds.items()}
        self._timed(parts, "end", self._engine.end)
        label = {"new_version": version, "abort_all_requests": False}
        self._timed(parts, "label", lambda: self._engine.post("/update_weight_version", label))

    def refused(self) -> str:
        """A digest that is not staged, in a pause; the engine goes on with the old weights."""
        found: list[str] = []

        def check(parts: dict[str, float]) -> None:
            self._engine.begin()
            report = self._timed(parts, "check", partial(self._engine.hook, Action.CHECK, "0" * 64))
            self._engine.end()
            found.append(report.problem)

        self._event("wrong digest refused", RETRACT, check)
        return found[0]

    def read_beside_decoding(self) -> dict[str, float]:
        """A checkpoint into the host stage while the streams run."""
        stage = self._host
        slot = next(s.name for s in stage.slots if s.sealed is not None and s.sealed.version != self._serves)
        begin = time.monotonic()
        read_into(self._settings, stage, slot, self._next)
        end = time.monotonic()
        stamps, _ = self._streams.stamps(begin, end)
        return {
            "seconds": round(end - begin, 2),
            "GB/s": round(self._prepared.size / 1e9 / (end - begin), 1),
            "decode, of base": round(len(stamps) / (end - begin) / self.base, 3),
        }

    def disk(self) -> None:
        """SGLang's own update from the same files, in shared memory."""
        for _ in range(min(2, self._settings.repeats)):
            version = self._other()
            body = {
                "model_path": str(checkpoint(self._settings, version)),
                "load_format": "auto",
                "flush_cache": False,
                "abort_all_requests": False,
            }
            update = partial(self._update, path="/update_weights_from_disk", bodies=[body])
            self._event("SGLang: from disk", RETRACT, update, version)

    def _update(self, parts: dict[str, float], *, path: str, bodies: list[dict[str, Any]]) -> None:
        for body in bodies:
            self._timed(parts, "updates", partial(self._engine.post, path, body))

    def _from_tensor(self, parts: dict[str, float], *, bodies: list[dict[str, Any]]) -> None:
        self._engine.begin()
        self._update(parts, path="/update_weights_from_tensor", bodies=bodies)
        self._engine.end()

    def colocated(self, named: Callable[[str], list[tuple[str, Any]]]) -> None:
        """SGLang's own: flattened buckets by CUDA IPC, packed before the pause. `named`: a version's tensors on the
        GPU."""
        import torch
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        monkey_patch_torch_reductions()
        for mebibytes in BUCKETS_MIB:
            version = self._other()
            packed = [FlattenedTensorBucket(named_tensors=part) for part in _parts(named(version), mebibytes << 20)]
            bodies = [
                {
                    "serialized_named_tensors": [
                        MultiprocessingSerializer.serialize(
                            {"flattened_tensor": one.get_flattened_tensor(), "metadata": one.get_metadata()},
                            output_str=True,
                        )
                    ],
                    "load_format": "flattened_bucket",
                    "flush_cache": False,
                }
                for one in packed
            ]
            torch.cuda.synchronize()

            send = partial(self._from_tensor, bodies=bodies)
            self._event(f"SGLang: CUDA IPC, {len(bodies)} buckets of {mebibytes} MiB", RETRACT, send, version)
            del packed, bodies, send
            gc.collect()
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()

    def table(self) -> list[dict[str, Any]]:
        return [asdict(row) for row in self.rows]


def _parts(named: list[tuple[str, Any]], limit: int) -> list[list[tuple[str, Any]]]:
    parts: list[list[tuple[str, Any]]] = [[]]
    size = 0
    for name, tensor in named:
        held = tensor.numel() * tensor.element_size()
        if parts[-1] and size + held > limit:
            parts.append([])
            size = 0
        parts[-1].append((name, tensor))
        size += held
    return parts
