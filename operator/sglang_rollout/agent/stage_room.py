"""Room in memory for weights that are not served yet: as much as the checkpoint needs that the engine starts from,
reserved before the engine starts, and found again by an agent that is started again."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sglang_rollout.protocol.report import StagedWeights, StageReport
from sglang_rollout.transfer.cuda_driver import CudaDriver, CudaError
from sglang_rollout.transfer.manifest import ManifestRefused, Tensor
from sglang_rollout.transfer.stage import Stage, reserve_host
from sglang_rollout.transfer.stage_index import (
    ALIGNMENT,
    SLOT_NAMES,
    SlotEntry,
    StageIndex,
    StageUnusable,
    read_index,
    read_manifest,
    write_running,
)

from .checkpoint import TIED_NAME, Checkpoint
from .holder import reserve_device
from .memory_limit import memory_limit
from .settings import StageSettings

log = logging.getLogger(__name__)

PAGE = 2 << 20
# What SGLang and NCCL need of /dev/shm for themselves, but never more than a part of it.
LEFT_BYTES = 512 << 20
SHARE_LEFT = 4
AGENT_BYTES = 512 << 20  # what the agent and the process that receives from trainers take besides


@dataclass(frozen=True)
class _Learned:
    """Of a manifest, which takes long to read when there are many tensors."""

    size: int
    layout: str


class StageRoom:
    """stage: None when nothing can be staged; then `problem` says why. medium None is no problem, and no stage."""

    def __init__(self, settings: StageSettings) -> None:
        self._settings = settings
        self.stage: Stage | None = None
        self.problem = ""
        self._learned: dict[str, _Learned] = {}  # by root
        if settings.medium == "None":
            self.problem = "weights are not staged in this pod: set agent.staging.medium to Host or Device"
            return
        try:
            self.stage = self._open()
        except (StageUnusable, CudaError):
            self.problem = "nothing is staged before the engine starts: there is no room reserved yet"

    @property
    def wanted(self) -> bool:
        return self._settings.medium != "None"

    @property
    def folder(self) -> Path:
        return self._settings.folder

    def reserve(self, checkpoint: Checkpoint) -> None:
        """Before the engine starts: call it from a thread. What is staged stays when the sizes are the same."""
        if not self.wanted:
            return
        size = room_for(checkpoint)
        try:
            if self._settings.medium == "Device":
                largest = max((tensor.size for tensor in checkpoint.tensors), default=0)
                reserve_device(self.folder, size, largest, self._settings)
                self.stage = self._open()
            else:
                self._leave_room(size)
                if self.stage is not None:
                    self.stage.close()
                self.stage = reserve_host(self.folder, size, self._settings.versions)
            write_running(self.folder, checkpoint.tensors)
            self.problem = ""
        except (StageUnusable, CudaError, ManifestRefused, OSError) as error:
            self.stage, self.problem = None, str(error)
            log.error("nothing can be staged: %s", error)

    def index(self) -> StageIndex:
        """As it is now: other processes write it, too."""
        if self.stage is None:
            return StageIndex(())
        try:
            return read_index(self.folder)
        except StageUnusable as error:
            log.error("%s", error)
            return StageIndex(())

    def holds(self, root: str) -> bool:
        return bool(root) and any(slot.sealed is not None and slot.sealed.root == root for slot in self.index().slots)

    def slot_to_write(self, served: str, needed: Iterable[str]) -> str:
        """The name of a slot whose bytes nobody needs: none of `needed` (roots that are about to be applied, or are
        being applied), and that of `served` only when there is no other; "" when each is needed."""
        needed = frozenset(needed)
        slots = [slot for slot in self.index().slots if slot.sealed is None or slot.sealed.root not in needed]

        def worth(slot: SlotEntry) -> int:
            return 0 if slot.sealed is None else 2 if slot.sealed.root == served else 1

        return min(slots, key=worth).name if slots else ""

    def layout(self, root: str) -> str:
        """Manifest.layout of what is staged as `root`. Reads a file, once. Raises StageUnusable."""
        return self._learn(root).layout

    def report(self) -> StageReport:
        held = [slot.sealed for slot in self.index().slots if slot.sealed is not None]
        return StageReport([StagedWeights(one.version, one.root, self._size(one.root)) for one in held], self.problem)

    def close(self) -> None:
        if self.stage is not None:
            self.stage.close()

    def _size(self, root: str) -> int:
        try:
            return self._learn(root).size
        except StageUnusable:
            return 0

    def _learn(self, root: str) -> _Learned:
        slot = self.index().holding(root)
        if root not in self._learned:
            manifest = read_manifest(self.folder, slot)
            held = {one.sealed.root for one in self.index().slots if one.sealed is not None}
            self._learned = {known: fact for known, fact in self._learned.items() if known in held}
            self._learned[root] = _Learned(manifest.size, manifest.layout)
        return self._learned[root]

    def _open(self) -> Stage:
        device = any(region.gpu for slot in read_index(self.folder).slots for region in slot.regions)
        return Stage(self.folder, CudaDriver() if device else None)

    def _leave_room(self, size: int) -> None:
        """Raises StageUnusable, with the numbers and what to write instead."""
        self.folder.mkdir(parents=True, exist_ok=True)
        ours = sum(file.stat().st_blocks * 512 for name in SLOT_NAMES for file in self.folder.glob(f"{name}.bytes"))
        found = os.statvfs(self.folder)
        whole, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize + ours
        wanted = size * self._settings.versions
        left = min(LEFT_BYTES, whole // SHARE_LEFT)
        if free - wanted < left:
            versions = f" x {self._settings.versions} versions" if self._settings.versions > 1 else ""
            raise StageUnusable(
                f"a stage of {_gib(size)}{versions} does not fit into the pod's shared memory of {_gib(whole)}, of "
                f"which {_gib(free)} are free and {_gib(left)} are left to the engine: set engine.sharedMemorySize to "
                f"{_gib(whole - free + wanted + left, up=True)}, or agent.staging.medium to None"
            )
        held = memory_limit()
        if held is not None and held.used + wanted - ours + AGENT_BYTES > held.limit:
            raise StageUnusable(
                f"a stage of {_gib(wanted)} counts as memory of the agent, whose limit is {_gib(held.limit)}: set the "
                f"memory in agent.resources.limits to {_gib(held.used + wanted - ours + AGENT_BYTES, up=True)}, or "
                "agent.staging.medium to None"
            )


def room_for(checkpoint: Checkpoint) -> int:
    """Bytes of a slot that takes any division of these tensors into buckets."""
    tensors: list[Tensor] = list(checkpoint.tensors)
    largest_tied = max((tensor.size for tensor in tensors if "embed" in tensor.name), default=0)
    tied = largest_tied if checkpoint.tied_names and TIED_NAME not in checkpoint.by_name else 0
    size = sum(tensor.size for tensor in tensors) + tied + ALIGNMENT * (len(tensors) + 1)
    return -(-size // PAGE) * PAGE


def _gib(size: int, up: bool = False) -> str:
    """As a Kubernetes quantity, in Mi below 10 GiB."""
    unit, name = (1 << 30, "Gi") if size >= 10 << 30 else (1 << 20, "Mi")
    return f"{-(-size // unit) if up else round(size / unit)}{name}"
