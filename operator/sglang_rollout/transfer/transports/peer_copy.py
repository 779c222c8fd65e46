"""Agents pull from the trainer's GPU memory by CUDA IPC and the copy engine: no kernel runs, so an engine on the same
GPU decodes on. Both processes must be in one host and see the trainer's GPU.

Memory that was exported is only freed when every agent has closed it: the sender says which to close."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..cuda_driver import CudaDriver, CudaError
from ..manifest import Bucket
from . import PEER_COPY, Meeting, Target, TransportBroken, TransportUnable
from .exported import ExportedBuckets, ExportPool

POLL_SECONDS = 0.0001
SETTLE_SECONDS = 0.5  # of a copy that was broken off; less than a receiver waits for its threads
LANES = 2  # the next copy is under way when one is seen to have ended
PROBE_BYTES = 1 << 20
_PROCESS = secrets.token_hex(8)
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers of a host


class PeerCopy:
    """device: ordinal of the GPU to send from or receive to."""

    name = PEER_COPY

    def __init__(self, device: int = 0) -> None:
        self._device = device

    def offer(self) -> dict[str, str] | None:
        try:
            import torch

            from .nccl import gpu_uuid

            if not torch.cuda.is_available():
                return None
            seen = [gpu_uuid(ordinal) for ordinal in range(torch.cuda.device_count())]
            return {"host": _BOOT.read_text().strip(), "gpu": seen[self._device], "sees": ",".join(seen)}
        except (ImportError, OSError):
            return None

    def suits(self, offers: Sequence[Mapping[str, str]]) -> bool:
        own = self.offer()
        return own is not None and all(
            offer.get("host") == own["host"] and own["gpu"] in offer.get("sees", "").split(",") for offer in offers
        )

    def open(self, meeting: Meeting) -> PeerCopySender:
        return PeerCopySender(self._device)

    def enter(self, meeting: Meeting, rank: int, details: Mapping[str, str]) -> PeerCopyReceiver:
        return PeerCopyReceiver(details, self._device)


class PeerCopySender:
    """Buckets lie in memory that can be exported, which torch's own may not be. Agents say when they have them."""

    name = PEER_COPY
    gpu = True
    pulled = True

    def __init__(self, device: int) -> None:
        """Raises TransportUnable."""
        import torch

        from ..gpu_bytes import flat_at

        self._device = device
        try:
            if device not in _POOLS:
                _POOLS[device] = ExportPool(CudaDriver(device))
            self._buckets = ExportedBuckets(_POOLS[device], PROBE_BYTES)
        except CudaError as error:
            raise TransportUnable(f"no memory of GPU {device} can be exported: {error}") from error
        with torch.cuda.device(device):
            flat_at(self._buckets.probe.address, PROBE_BYTES).copy_(_pattern())
            torch.cuda.synchronize(device)

    def details(self, rank: int) -> dict[str, str]:
        return {"probe": self._buckets.probe.handle, "process": _PROCESS}

    def gather(self, seconds: float) -> None:
        """There is nothing to gather: each agent opens what it is told."""

    def buffer(self, number: int, size: int) -> Any:
        from ..gpu_bytes import flat_at

        try:
            taken = self._buckets.take(number, size)
        except CudaError as error:
            raise TransportBroken(f"no {size} bytes of GPU memory for a bucket: use smaller ones ({error})") from error
        return flat_at(taken.address, max(size, 1))[:size]

    def load(self, number: int, pieces: Sequence[Any]) -> dict[str, str]:
        handle, closing = self._buckets.handles(number)
        return {"handle": handle, "close": ",".join(closing), "process": _PROCESS}

    def send(self, number: int, seconds: float) -> None:
        """The agents pull; their word that they have it is what counts."""

    def free(self, number: int) -> None:
        self._buckets.free(number)

    def abort(self) -> None:
        self._buckets.abort()


_POOLS: dict[int, ExportPool] = {}
"""By GPU: what is exported outlives groups, since agents keep it open."""

_GOING_ON: list[Any] = []
"""Ends of copies that were ordered: until then they write to where they were to, broken off or not."""

_ORDERING = threading.Lock()

_OPENED: dict[str, dict[str, int]] = {}
"""Addresses of what this process has opened, by sender's process and handle: opening takes milliseconds."""


class PeerCopyReceiver:
    gpu = True
    lanes = LANES

    def __init__(self, details: Mapping[str, str], device: int) -> None:
        self._details = details
        self._device = device
        self._driver: CudaDriver | None = None
        self._aborted = threading.Event()

    def join(self, seconds: float) -> None:
        """Opens a small buffer and compares it: only what has been seen to work is relied on."""
        import torch

        from ..gpu_bytes import flat_at

        if not _see_out(time.monotonic() + seconds):
            raise TransportUnable("a copy of before that was broken off has not ended")
        try:
            self._driver = CudaDriver(self._device)
            self._close_others()
            probe = self._open(self._details["process"], self._details["probe"])
            with torch.cuda.device(self._device):
                here = torch.empty(PROBE_BYTES, dtype=torch.uint8, device=f"cuda:{self._device}")
                self._copy(here, flat_at(probe, PROBE_BYTES), time.monotonic() + seconds)
                same = torch.equal(here.cpu(), _pattern())
        except (CudaError, RuntimeError, KeyError) as error:
            raise TransportUnable(f"the trainer's GPU memory cannot be read: {str(error).splitlines()[0]}") from error
        if not same:
            raise TransportUnable("the trainer's GPU memory reads as something else than it wrote")

    def receive(self, bucket: Bucket, details: Mapping[str, str], target: Target, seconds: float) -> None:
        import torch

        from ..gpu_bytes import flat_at

        if not bucket.size:
            return
        try:
            for handle in filter(None, details.get("close", "").split(",")):
                self._close(details["process"], handle)
            source = self._open(details["process"], details["handle"])
            with torch.cuda.device(self._device):
                self._copy(
                    flat_at(target.address, bucket.size), flat_at(source, bucket.size), time.monotonic() + seconds
                )
        except (CudaError, RuntimeError, KeyError) as error:
            raise TransportBroken(f"the trainer's GPU memory cannot be read: {str(error).splitlines()[0]}") from error

    def abort(self) -> None:
        self._aborted.set()

    def _copy(self, into: Any, source: Any, end: float) -> None:
        import torch

        stream = torch.cuda.Stream(self._device)
        with _ORDERING:  # nobody sees it aborted and this copy not yet among those that go on
            self._go_on(end)
            with torch.cuda.stream(stream):
                into.copy_(source, non_blocking=True)
            done = stream.record_event()
            _GOING_ON.append(done)
        try:
            while not done.query():
                self._go_on(end)
                time.sleep(POLL_SECONDS)
        except TransportBroken:
            _see_out(time.monotonic() + SETTLE_SECONDS)
            raise
        stuck()  # what has ended is forgotten

    def _go_on(self, end: float) -> None:
        """Raises TransportBroken."""
        if self._aborted.is_set():
            raise TransportBroken("the transfer was broken off")
        if time.monotonic() > end:
            raise TransportBroken("the copy did not end in time")

    def _open(self, process: str, handle: str) -> int:
        assert self._driver is not None
        opened = _OPENED.setdefault(process, {})
        if handle not in opened:
            opened[handle] = self._driver.open(handle)
        return opened[handle]

    def _close(self, process: str, handle: str) -> None:
        assert self._driver is not None
        address = _OPENED.get(process, {}).pop(handle, None)
        if address is not None:
            self._driver.close(address)

    def _close_others(self) -> None:
        """What another sender exported, which may have ended: its memory is held as long as it is open here."""
        for process in [process for process in _OPENED if process != self._details["process"]]:
            for handle in list(_OPENED[process]):
                self._close(process, handle)
            del _OPENED[process]


def stuck() -> bool:
    """Whether a copy goes on; asked when all have ended or been broken off. Nothing calls one back: what it writes to
    must not be another's, nor be written by another, before it has ended."""
    with _ORDERING:
        _GOING_ON[:] = [one for one in _GOING_ON if not _ended(one)]
        return bool(_GOING_ON)


def _ended(copied: Any) -> bool:
    try:
        return bool(copied.query())
    except RuntimeError:  # of the GPU: this process can do nothing more with it
        return False


def _see_out(end: float) -> bool:
    """Whether all that were broken off have ended, by then."""
    while stuck():
        if time.monotonic() > end:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _pattern() -> Any:
    import torch

    return (torch.arange(PROBE_BYTES, dtype=torch.int64) * 2654435761 >> 7).to(torch.uint8)
