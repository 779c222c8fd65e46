"""The staged weights of a pod, as the agent keeps them: reserved once, written bucket by bucket with every byte
checked, sealed when whole. Survives the agent: what was sealed is found again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .comparison import some
from .cuda_driver import CudaDriver
from .host_checks import BucketCheck, Checked, check_bucket, spans
from .manifest import Bucket, Manifest
from .regions import PIECE, DeviceRegion, HostRegion, identity_of, open_region, reserve_file
from .stage_index import (
    INDEX,
    SLOT_NAMES,
    Placement,
    Region,
    Sealed,
    SlotEntry,
    StageIndex,
    StageUnusable,
    read_index,
    write_index,
    write_whole,
)


class BytesRefused(Exception):
    """Bytes that came are not what was announced, or must not reach an engine; names the tensor."""


def reserve_host(folder: Path, slot_bytes: int, slots: int) -> Stage:
    """A stage of `slots` (1 or 2) versions in shared memory, of `slot_bytes` each. What an earlier agent left there is
    kept when the sizes are the same. Raises StageUnusable with the numbers when there is no room."""
    names = SLOT_NAMES[:slots]
    folder.mkdir(parents=True, exist_ok=True)
    wanted = StageIndex(tuple(SlotEntry(name, (Region(slot_bytes, path=f"{name}.bytes"),)) for name in names))
    kept = _kept(folder, wanted)
    if kept is None:
        (folder / INDEX).unlink(missing_ok=True)
        for old in folder.glob("*.bytes"):
            old.unlink()
    try:
        for slot in wanted.slots:
            reserve_file(folder / slot.regions[0].path, slot_bytes)
    except StageUnusable:
        for slot in wanted.slots:
            (folder / slot.regions[0].path).unlink(missing_ok=True)
        raise
    if kept is None:
        write_index(folder, wanted)
    return Stage(folder)


def _kept(folder: Path, wanted: StageIndex) -> StageIndex | None:
    try:
        found = read_index(folder)
    except StageUnusable:
        return None
    return found if [s.regions for s in found.slots] == [s.regions for s in wanted.slots] else None


class Stage:
    """An open stage. `driver` for one in GPU memory."""

    def __init__(self, folder: Path, driver: CudaDriver | None = None) -> None:
        """Raises StageUnusable when none was reserved in `folder`."""
        self.folder = folder
        self._driver = driver
        self._index = read_index(folder)
        self._opened: dict[str, _Opened] = {}

    @property
    def slots(self) -> tuple[SlotEntry, ...]:
        return self._index.slots

    def holds(self, root: str) -> bool:
        return any(slot.sealed is not None and slot.sealed.root == root for slot in self.slots)

    def free_slot(self, keep: str) -> SlotEntry:
        """The slot to write next: an empty one, else one that does not hold `keep` (a root), else the only one."""
        empty = [slot for slot in self.slots if slot.sealed is None]
        other = [slot for slot in self.slots if slot.sealed is not None and slot.sealed.root != keep]
        return (*empty, *other, *self.slots)[0]

    def write(self, slot: str, algorithm: str, *, allow_nonfinite: bool = False) -> StageWriter:
        """From here on the slot holds nothing until it is sealed. No engine may be applying it."""
        self._note(slot, None)
        return StageWriter(self, self._index.slot(slot), algorithm, allow_nonfinite)

    def regions(self, slot: SlotEntry) -> list[HostRegion | DeviceRegion]:
        """Opened once and kept, while it is the same memory: touching every page of a fresh mapping takes longer than
        reading into it."""
        identity = self.identity(slot)
        known = self._opened.get(slot.name)
        if known is None or known.identity != identity:
            # One of before is left to those that still use it.
            opened = [open_region(self.folder, region, self._driver) for region in slot.regions]
            known = self._opened[slot.name] = _Opened(identity, opened)
        return known.regions

    def identity(self, slot: SlotEntry) -> tuple[object, ...]:
        """Tells the slot's memory from that of a stage that was there before. Raises StageUnusable."""
        return tuple(identity_of(self.folder, region) for region in slot.regions)

    def close(self) -> None:
        """What is sealed stays."""
        for opened in self._opened.values():
            for region in opened.regions:
                region.close()
        self._opened.clear()

    def seal(
        self, slot: SlotEntry, identity: tuple[object, ...], version: str, manifest: Manifest, total: int | None
    ) -> None:
        """`identity`: of the memory that was filled. Raises StageUnusable when the stage has other memory by now."""
        if self.identity(read_index(self.folder).slot(slot.name)) != identity:
            raise StageUnusable(f"the stage was made anew while slot {slot.name} was being filled: stage it again")
        write_whole(self.folder / slot.manifest_file, manifest.to_json())
        self._note(slot.name, Sealed(version, manifest.root, total, manifest.layout, manifest.placing))

    def _note(self, slot: str, sealed: Sealed | None) -> None:
        # Read anew: what writes is often a child of the agent, which has a Stage of its own.
        self._index = read_index(self.folder).with_sealed(slot, sealed)
        write_index(self.folder, self._index)


@dataclass(frozen=True)
class _Opened:
    identity: tuple[object, ...]
    regions: list[HostRegion | DeviceRegion]


class StageWriter:
    """Fills one slot. Buckets are placed in the order of place(), and may be filled by several threads."""

    def __init__(self, stage: Stage, slot: SlotEntry, algorithm: str, allow_nonfinite: bool) -> None:
        self._stage = stage
        self._slot = slot
        self._algorithm = algorithm
        self._allow_nonfinite = allow_nonfinite
        self._placement = Placement(slot.regions)
        self._places: list[tuple[Bucket, int, int]] = []
        self._digests: dict[int, str] = {}
        self._sums: dict[int, int] = {}
        self._lock = threading.Lock()
        self._identity = stage.identity(slot)
        self._regions = stage.regions(slot)
        self.nonfinite: dict[str, int] = {}

    def place(self, bucket: Bucket) -> int:
        """The bucket's number. Raises StageUnusable when the slot is full."""
        region, offset = self._placement.place(bucket)
        self._places.append((bucket, region, offset))
        return len(self._places) - 1

    @contextmanager
    def fill(self, number: int) -> Iterator[memoryview]:
        """The bucket's bytes, to be written whole; checked on exit. Raises BytesRefused when the bucket announced
        another digest, or for values that are not finite."""
        bucket, region, offset = self._places[number]
        with self._regions[region].window(offset, bucket.size) as view:
            yield view
            found = check_bucket(view, bucket, self._algorithm)
            self._accept(number, bucket, found)

    def fill_in_order(self, number: int, read: Callable[[memoryview], None]) -> None:
        """As fill(), of bytes that come one after the other: `read` is called with each part of the bucket in its turn
        and fills it. No host memory of the bucket's size is needed for a stage in GPU memory."""
        bucket, region, offset = self._places[number]
        check = BucketCheck(self._algorithm)
        for span in spans(bucket, PIECE):
            with self._regions[region].window(offset + span.begin, span.size) as view:
                read(view)
                check.add(view, span)
        self._accept(number, bucket, check.found())

    def address(self, number: int) -> int | None:
        """Of the bucket in GPU memory; None: it is in host memory."""
        _, region, offset = self._places[number]
        opened = self._regions[region]
        return None if isinstance(opened, HostRegion) else opened.address(offset)

    def check_on_gpu(
        self, numbers: Sequence[int], check: Callable[[Sequence[tuple[int, Bucket]], str], Sequence[Checked]]
    ) -> None:
        """As fill() does at its end, of buckets that lie at their addresses already: `check` computes there what
        check_bucket does, of several (address, bucket) at once."""
        placed = []
        for number in numbers:
            address = self.address(number)
            assert address is not None
            placed.append((address, self._places[number][0]))
        for number, (_, bucket), found in zip(numbers, placed, check(placed, self._algorithm), strict=True):
            self._accept(number, bucket, found)

    def _accept(self, number: int, bucket: Bucket, found: Checked) -> None:
        if bucket.digest and bucket.digest != found.digest:
            raise BytesRefused(
                f"bucket {number}, of tensors {some(t.name for t in bucket.tensors)}, has digest {found.digest} "
                f"and was announced with {bucket.digest}"
            )
        if found.nonfinite and not self._allow_nonfinite:
            counts = some(f"{name} ({count})" for name, count in found.nonfinite.items())
            raise BytesRefused(f"values that are Inf or NaN, of which the engine would die, in tensors {counts}")
        with self._lock:
            self._digests[number] = found.digest
            self._sums[number] = found.word_sum
            self.nonfinite |= found.nonfinite

    def seal(
        self,
        version: str,
        *,
        root: str = "",
        aliases: Mapping[str, str] | None = None,
        likely: Manifest | None = None,
    ) -> Manifest:
        """The slot now holds `version`. likely: taken if it is what came, since its digests are known already. Raises
        BytesRefused when a bucket is missing or the whole is not `root` (when given), ManifestRefused, StageUnusable
        when the stage was made anew meanwhile."""
        missing = [number for number in range(len(self._places)) if number not in self._digests]
        if missing:
            raise BytesRefused(
                f"{len(missing)} of {len(self._places)} buckets have not come, the first is {missing[0]}"
            )
        buckets = tuple(Bucket(place[0].tensors, self._digests[n]) for n, place in enumerate(self._places))
        manifest = Manifest(buckets, self._algorithm, aliases or {})
        if manifest == likely:
            manifest = likely
        if root and manifest.root != root:
            raise BytesRefused(f"the weights have digest {manifest.root[:12]} and were announced with {root[:12]}")
        whole_words = all(tensor.size % 8 == 0 for bucket in buckets for tensor in bucket.tensors)
        total = sum(self._sums.values()) % (1 << 64)
        self._stage.seal(self._slot, self._identity, version, manifest, total if whole_words else None)
        return manifest
