"""The file by which agent, transports and the engine's hook of one pod find the staged bytes. Standard library only.

A slot holds one version. Its bytes lie in regions: a file in shared memory, or GPU memory that a holder process
exports. Only what is sealed may be read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from .manifest import Bucket, Manifest, ManifestRefused, Tensor, bucket_of, root_of

FORMAT = 1
SLOT_NAMES = ("a", "b")
INDEX = "index.json"
RUNNING = "running.json"
ALIGNMENT = 512  # of a bucket in its region: what device copies like best, and any element type's need
DEFAULT_FOLDER = "/dev/shm/sglang-rollout"  # noqa: S108 - shared memory of the pod
ENV_FOLDER = "SGLANG_ROLLOUT_STAGE_DIR"


class StageUnusable(Exception):
    """There is no stage, or not the bytes asked for; the sentence says which."""


@dataclass(frozen=True)
class Region:
    """`size` in bytes. `gpu` is "" for shared memory in the file `path` (relative to the index), else the UUID of the
    GPU ("GPU-...") whose memory the CUDA IPC handle `handle` (hex) opens."""

    size: int
    path: str = ""
    gpu: str = ""
    handle: str = ""


@dataclass(frozen=True)
class Sealed:
    """What a slot holds, whole and verified. `word_sum` of all tensors as in host_checks, None when not computed.
    `layout` and `placing` of its manifest, so that nobody has to read that in a pause; "": not known."""

    version: str
    root: str
    word_sum: int | None = None
    layout: str = ""
    placing: str = ""


@dataclass(frozen=True)
class SlotEntry:
    name: str
    regions: tuple[Region, ...]
    sealed: Sealed | None = None

    @property
    def manifest_file(self) -> str:
        return f"{self.name}.manifest.json"


@dataclass(frozen=True)
class StageIndex:
    slots: tuple[SlotEntry, ...]

    def slot(self, name: str) -> SlotEntry:
        for slot in self.slots:
            if slot.name == name:
                return slot
        raise StageUnusable(f"the stage has no slot {name!r}")

    def holding(self, root: str) -> SlotEntry:
        """Raises StageUnusable."""
        for slot in self.slots:
            if slot.sealed is not None and slot.sealed.root == root:
                return slot
        held = ", ".join(f"{s.sealed.version} ({s.sealed.root[:12]})" for s in self.slots if s.sealed) or "nothing"
        raise StageUnusable(f"weights with digest {root[:12]} are not staged here: the stage holds {held}")

    def with_sealed(self, name: str, sealed: Sealed | None) -> StageIndex:
        return StageIndex(tuple(replace(s, sealed=sealed) if s.name == name else s for s in self.slots))


def read_index(folder: Path) -> StageIndex:
    """Raises StageUnusable."""
    try:
        value = json.loads((folder / INDEX).read_bytes())
        if value["format"] != FORMAT:
            raise StageUnusable(f"{folder / INDEX} is of format {value['format']}, not {FORMAT}")
        return StageIndex(
            tuple(
                SlotEntry(
                    str(slot["name"]),
                    tuple(Region(**region) for region in slot["regions"]),
                    Sealed(**slot["sealed"]) if slot["sealed"] else None,
                )
                for slot in value["slots"]
            )
        )
    except FileNotFoundError:
        raise StageUnusable(f"there is no stage in {folder}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise StageUnusable(f"{folder / INDEX} cannot be read: {error!r}") from error


def write_index(folder: Path, index: StageIndex) -> None:
    write_whole(folder / INDEX, json.dumps({"format": FORMAT, **asdict(index)}).encode())


def device_index(folder: Path, slots: Sequence[Sequence[Region]]) -> None:
    """Written by the holder of GPU memory when it has reserved it: one list of regions for each slot."""
    folder.mkdir(parents=True, exist_ok=True)
    write_index(folder, StageIndex(tuple(SlotEntry(n, tuple(r)) for n, r in zip(SLOT_NAMES, slots, strict=False))))


def read_manifest(folder: Path, slot: SlotEntry) -> Manifest:
    """The manifest of what the slot holds, equal to its root. Raises StageUnusable."""
    if slot.sealed is None:
        raise StageUnusable(f"slot {slot.name} holds nothing")
    try:
        data = (folder / slot.manifest_file).read_bytes()
        found = root_of(data)
        if found != slot.sealed.root:
            raise StageUnusable(
                f"the manifest of slot {slot.name} has digest {found[:12]}, the index says {slot.sealed.root[:12]}"
            )
        return Manifest.from_json(data)
    except (OSError, ManifestRefused) as error:
        raise StageUnusable(f"the manifest of slot {slot.name} cannot be read: {error}") from error


def write_running(folder: Path, tensors: Iterable[Tensor]) -> None:
    """What the engine of this pod starts from, so that its loader can try such weights before any are staged. Raises
    ManifestRefused."""
    write_whole(folder / RUNNING, Manifest((bucket_of(list(tensors)),), "").to_json())


def read_running(folder: Path) -> Manifest | None:
    """None when nobody has said it. Raises StageUnusable."""
    try:
        return Manifest.from_json((folder / RUNNING).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ManifestRefused) as error:
        raise StageUnusable(f"{folder / RUNNING} cannot be read: {error}") from error


def write_whole(path: Path, data: bytes) -> None:
    """Readers see the old file or the new one. Kept through a crash of processes, not of the machine: it is memory."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    beside.write_bytes(data)
    beside.replace(path)


class Placement:
    """Where each bucket lies, one after the other: in the region that has most room left, so that buckets spread over
    the GPUs. Writers and readers compute it alike."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._regions = regions
        self._used = [0] * len(regions)

    def place(self, bucket: Bucket) -> tuple[int, int]:
        """Region and offset in it. Raises StageUnusable when the bucket fits nowhere."""
        room = [region.size - used for region, used in zip(self._regions, self._used, strict=True)]
        chosen = max(range(len(room)), key=lambda i: room[i], default=None)
        if chosen is None or room[chosen] < bucket.size:
            raise StageUnusable(self._no_room(bucket.size, room))
        offset = self._used[chosen]
        self._used[chosen] = -(-(offset + bucket.size) // ALIGNMENT) * ALIGNMENT
        return chosen, offset

    def _no_room(self, size: int, room: Sequence[int]) -> str:
        total = sum(region.size for region in self._regions)
        taken = f"a bucket of {size} bytes does not fit: {sum(self._used)} of the slot's {total} bytes are taken"
        if sum(room) >= size:
            return (
                f"{taken}, and {max(room)} are the most that are left on one of its {len(room)} GPUs: send smaller "
                "buckets (bucket_bytes), or set agent.staging.bucketSize to their size"
            )
        return f"{taken}: these weights are larger than those that the engine started from"


def region_bytes(size: int, regions: int, largest: int) -> int:
    """What each of several regions of a slot needs so that `size` bytes, alignment included, fit in whatever buckets
    of at most `largest` bytes they come: as long as less than size + (regions - 1) x largest are taken, some region
    has room for one more."""
    return -(-(size + (regions - 1) * largest) // regions)


def slot_bytes(manifest: Manifest) -> int:
    """What a slot of one region needs for these weights."""
    return sum(-(-bucket.size // ALIGNMENT) * ALIGNMENT for bucket in manifest.buckets)
