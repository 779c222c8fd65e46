"""The stage as this process sees it: its regions mapped once, pinned once, and the tensors in them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sglang_rollout.transfer.cuda_driver import CudaDriver
from sglang_rollout.transfer.dtypes import DTYPES
from sglang_rollout.transfer.gpu_bytes import flat_at
from sglang_rollout.transfer.manifest import Manifest, Tensor
from sglang_rollout.transfer.stage_index import Placement, Region, SlotEntry, StageUnusable


@dataclass
class _Mapping:
    """`identity` tells whether the region is still the one that was mapped. `bytes` is a flat uint8 tensor."""

    identity: tuple[object, ...]
    bytes: Any
    pinned: int = 0  # address, 0 when not


class MappedStage:
    """Regions stay mapped: both slots are fixed memory, and mapping or pinning in every pause would cost more than
    the copy."""

    def __init__(self, folder: Path, device: Any) -> None:
        self.folder = folder
        self._device = device
        self._driver: CudaDriver | None = None
        self._mapped: dict[tuple[str, int], _Mapping] = {}
        self._generations: dict[str, int] = {}

    def map(self, slot: SlotEntry, *, pin: bool) -> None:
        """Raises StageUnusable, CudaError."""
        for number, region in enumerate(slot.regions):
            key = (slot.name, number)
            identity = self._identity(region)
            known = self._mapped.get(key)
            if known is not None and known.identity == identity:
                continue
            if known is not None:
                self._forget(key, known)
            self._mapped[key] = self._open(region, identity, pin)
            self._generations[slot.name] = self._generations.get(slot.name, 0) + 1

    def generation(self, slot: SlotEntry) -> int:
        """Another number whenever the slot has been mapped anew: views from before are of no use."""
        return self._generations[slot.name]

    def on_host(self, slot: SlotEntry) -> bool:
        return all(region.path for region in slot.regions)

    def region(self, slot: SlotEntry, number: int) -> Any:
        """Its flat bytes."""
        return self._mapped[(slot.name, number)].bytes

    def tensors(self, slot: SlotEntry, manifest: Manifest) -> Iterator[tuple[str, Any]]:
        """Views by checkpoint name, in the manifest's order. Raises StageUnusable."""
        for tensor, number, begin in placed(slot.regions, manifest):
            yield tensor.name, _view(self.region(slot, number), begin, tensor)

    def some_tensors(self, slot: SlotEntry, found: Mapping[str, tuple[Tensor, int, int]]) -> dict[str, Any]:
        """Views of those that were found by placed()."""
        return {name: _view(self.region(slot, number), begin, one) for name, (one, number, begin) in found.items()}

    def _identity(self, region: Region) -> tuple[object, ...]:
        if not region.path:
            return (region.gpu, region.handle, region.size)
        try:
            status = os.stat(self.folder / region.path)
        except OSError as error:
            raise StageUnusable(f"the stage's memory {region.path} is gone: {error.strerror}") from error
        if status.st_size < region.size:
            raise StageUnusable(f"{region.path} has {status.st_size} bytes, the index says {region.size}")
        return (region.path, status.st_ino, region.size)

    def _open(self, region: Region, identity: tuple[object, ...], pin: bool) -> _Mapping:
        if not region.path:
            if self._device.type != "cuda":
                raise StageUnusable("the stage is in GPU memory and this model is not on a GPU")
            return _Mapping(identity, flat_at(self._cuda().open(region.handle), region.size))
        with (self.folder / region.path).open("r+b") as file:
            # Read-write, since torch takes no read-only memory; nothing here writes.
            flat = torch.frombuffer(mmap.mmap(file.fileno(), region.size), dtype=torch.uint8)
        if not pin:
            return _Mapping(identity, flat)
        self._cuda().register(flat.data_ptr(), region.size)
        return _Mapping(identity, flat, flat.data_ptr())

    def _forget(self, key: tuple[str, int], known: _Mapping) -> None:
        del self._mapped[key]
        if known.pinned:
            self._cuda().unregister(known.pinned)
        elif known.bytes.device.type == "cuda":
            self._cuda().close(known.bytes.data_ptr())

    def _cuda(self) -> CudaDriver:
        if self._driver is None:
            self._driver = CudaDriver(self._device.index or 0)
        return self._driver


def placed(regions: Sequence[Region], manifest: Manifest) -> Iterator[tuple[Tensor, int, int]]:
    """Each tensor with the number of its region and the bytes before it there. Raises StageUnusable."""
    placement = Placement(regions)
    for bucket in manifest.buckets:
        number, begin = placement.place(bucket)
        for tensor, offset in bucket.placed():
            yield tensor, number, begin + offset


def _view(flat: Any, begin: int, tensor: Tensor) -> Any:
    dtype = getattr(torch, DTYPES[tensor.dtype].torch)
    return flat[begin : begin + tensor.size].view(dtype).view(tensor.shape)
