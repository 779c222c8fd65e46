"""SGLang's own updates, on the same engine and the same bytes: from disk, and flattened buckets by CUDA IPC."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sglang_rollout.engine.loader.mapped import MappedStage
from sglang_rollout.transfer.stage_index import read_index, read_manifest

from .commits import Commits
from .engine import Engine
from .events import RETRACT, Parts, timed
from .preparation import VERSIONS, checkpoint
from .settings import Settings

WHOLE = 20000
"""MiB of a bucket that takes a whole model of 16 GB."""
SMALL = (512, 2048)
Named = list[tuple[str, Any]]


@dataclass
class SGLangOwn:
    settings: Settings
    commits: Commits

    def disk(self) -> None:
        """From files in shared memory, so that no disk is measured."""
        for _ in range(min(2, self.settings.repeats)):
            version = self._other()
            update = partial(update_from_disk, self.commits.engine, self.settings, version)
            self.commits.events.event("SGLang: from disk", RETRACT, update, version)

    def colocated(self) -> None:
        """Buckets packed before the pause, as a trainer on the same GPU can."""
        packed = {version: pack(self.settings, version, WHOLE) for version in VERSIONS}
        for _ in range(self.settings.repeats):
            self._send(packed, WHOLE)
        packed.clear()
        for mebibytes in SMALL:
            for _ in range(2):
                free()
                version = self._other(peek=True)
                packed[version] = pack(self.settings, version, mebibytes)
                self._send(packed, mebibytes)
                packed.clear()
        free()

    def _send(self, packed: dict[str, list[Any]], mebibytes: int) -> None:
        version = self._other()
        bodies = serialized(packed[version])
        name = f"SGLang: CUDA IPC, {len(bodies)} buckets of {mebibytes} MiB"
        send = partial(update_from_tensors, self.commits.engine, bodies)
        self.commits.events.event(name if len(bodies) > 1 else "SGLang: CUDA IPC, one bucket", RETRACT, send, version)

    def _other(self, *, peek: bool = False) -> str:
        version = next(v for v in VERSIONS if v != self.commits.serves)
        if not peek:
            self.commits.serves = version
        return version


def update_from_disk(engine: Engine, settings: Settings, version: str, parts: Parts) -> None:
    folder = str(checkpoint(settings, version))
    body = {"model_path": folder, "load_format": "auto", "flush_cache": False, "abort_all_requests": False}
    with timed(parts, "updates"):
        engine.post("/update_weights_from_disk", body)


def update_from_tensors(engine: Engine, bodies: Sequence[dict[str, Any]], parts: Parts) -> None:
    engine.begin()
    for body in bodies:
        with timed(parts, "updates"):
            engine.post("/update_weights_from_tensor", body)
    engine.end()


def pack(settings: Settings, version: str, mebibytes: int) -> list[Any]:
    """Flattened buckets in memory of this process, which stands for a trainer's."""
    import torch
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    monkey_patch_torch_reductions()
    packed = [
        FlattenedTensorBucket(named_tensors=part) for part in parts_of(_named(settings, version), mebibytes << 20)
    ]
    torch.cuda.synchronize()
    return packed


def serialized(packed: Sequence[Any]) -> list[dict[str, Any]]:
    """Bodies for one update: each IPC handle is good for one."""
    from sglang.srt.utils import MultiprocessingSerializer

    return [
        {
            "serialized_named_tensors": [
                MultiprocessingSerializer.serialize(
                    {"flattened_tensor": one.get_flattened_tensor(), "metadata": one.get_metadata()}, output_str=True
                )
            ],
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        for one in packed
    ]


def free() -> None:
    import torch

    gc.collect()
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()


def parts_of(named: Named, limit: int) -> list[Named]:
    parts: list[Named] = [[]]
    size = 0
    for name, tensor in named:
        held = tensor.numel() * tensor.element_size()
        if parts[-1] and size + held > limit:
            parts.append([])
            size = 0
        parts[-1].append((name, tensor))
        size += held
    return parts


_MAPPED: list[MappedStage] = []


def _named(settings: Settings, version: str) -> Named:
    """The tensors of the device stage, which is mapped once."""
    import torch

    folder = settings.work / "device"
    if not _MAPPED:
        _MAPPED.append(MappedStage(folder, torch.device("cuda:0")))
        for slot in read_index(folder).slots:
            _MAPPED[0].map(slot, pin=False)
    slots = read_index(folder).slots
    slot = next(slot for slot in slots if slot.sealed is not None and slot.sealed.version == version)
    return list(_MAPPED[0].tensors(slot, read_manifest(folder, slot)))
