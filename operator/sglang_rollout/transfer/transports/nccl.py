"""Broadcast between GPUs by NCCL, in a process group of its own. The fastest where GPUs are not in one host; it runs a
kernel on both sides, which halves an engine's decoding on the same GPU while it lasts.

NCCL waits for a lost peer for ever: every wait here is a poll with a deadline; aborted groups are torn down beside."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from ..manifest import Bucket
from . import NCCL, Meeting, Target, TransportBroken, TransportUnable

POLL_SECONDS = 0.0001
_OF_BOTH_SIDES = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")  # ranks of one communicator must agree on these
# torch's watchdog and monitor end the process by default when a collective fails; here they only clean up.
_HARMLESS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
_making = threading.Lock()

stuck: set[int] = set()
"""Groups that were aborted and whose collectives may still write where they were to receive."""


class Nccl:
    """device: ordinal of the GPU to send from or receive to."""

    name = NCCL

    def __init__(self, device: int = 0) -> None:
        self._device = device

    def offer(self) -> dict[str, str] | None:
        try:
            import torch
            import torch.distributed as distributed
        except ImportError:
            return None
        usable = distributed.is_available() and distributed.is_nccl_available() and torch.cuda.is_available()
        return {"gpu": gpu_uuid(self._device)} if usable else None

    def suits(self, offers: Sequence[Mapping[str, str]]) -> bool:
        own = self.offer()
        gpus = [own["gpu"], *(offer.get("gpu", "") for offer in offers)] if own else []
        return own is not None and len(set(gpus)) == len(gpus)  # a GPU may be in a communicator only once

    def open(self, meeting: Meeting) -> NcclSender:
        return NcclSender(meeting, self._device)

    def enter(self, meeting: Meeting, rank: int, details: Mapping[str, str]) -> NcclReceiver:
        return NcclReceiver(meeting, rank, details, self._device)


class NcclGroup:
    """A process group that belongs to us alone, never torch's default one."""

    def __init__(
        self,
        store: Any,
        meeting: Meeting,
        rank: int,
        seconds: float,
        device: int | None = None,
        *,
        rehearse: bool = True,
    ) -> None:
        """Returns when all are there; without `rehearse`, which the others must do as well, that is found out by the
        first broadcast. device: absent, torch's current one. Raises RuntimeError."""
        import torch
        from torch.distributed import PrefixStore, ProcessGroupNCCL

        self._device = torch.cuda.current_device() if device is None else device
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=max(seconds, 600.0))  # our own deadlines come first
        with _making, _environment(_HARMLESS):
            self._group: Any = ProcessGroupNCCL(PrefixStore(meeting.group, store), rank, meeting.world, options)
        self._aborted = threading.Event()
        self._stream = torch.cuda.Stream(self._device)
        if rehearse:
            # The communicator is made by the first collective, which needs everybody.
            first = torch.zeros(8, dtype=torch.uint8, device=f"cuda:{self._device}")
            torch.cuda.current_stream(self._device).synchronize()
            self.broadcast([first], seconds)

    def broadcast(self, tensors: Sequence[Any], seconds: float) -> None:
        """The bytes are there when it returns. Raises TransportBroken."""
        import torch
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        end = time.monotonic() + seconds
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                works = [self._group.broadcast([tensor], options) for tensor in tensors]
                for work in works:
                    self._wait(work, end)
                self._stream.synchronize()
        except TransportBroken:
            self.abort()
            raise
        except RuntimeError as error:
            self.abort()
            raise TransportBroken(str(error).splitlines()[0][:200]) from error

    def _wait(self, work: Any, end: float) -> None:
        while not work.is_completed():
            if self._aborted.is_set():
                raise TransportBroken("the transfer was broken off")
            if time.monotonic() > end:
                raise TransportBroken("the broadcast did not end in time")
            time.sleep(POLL_SECONDS)
        work.wait()  # only lets the stream wait for what has ended, and raises what went wrong

    def abort(self) -> None:
        if self._aborted.is_set():
            return
        self._aborted.set()
        group = self._group
        stuck.add(id(group))
        threading.Thread(target=lambda: _tear_down(group), name="nccl-abort", daemon=True).start()


def _tear_down(group: Any) -> None:
    with suppress(RuntimeError):  # it is of no use either way
        group.abort()
    stuck.discard(id(group))


@contextmanager
def _environment(words: Mapping[str, str]) -> Iterator[None]:
    """While a group is made, which reads them: the trainer's own groups keep what it has set for them."""
    before = {name: os.environ.get(name) for name in words}
    os.environ.update(words)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def gpu_uuid(device: int) -> str:
    """As NVIDIA_VISIBLE_DEVICES writes it."""
    import torch

    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"


class NcclSender:
    name = NCCL
    gpu = True
    pulled = False

    def __init__(self, meeting: Meeting, device: int) -> None:
        """Raises TransportUnable."""
        from torch.distributed import TCPStore

        try:
            self._store: Any = TCPStore(
                meeting.host, 0, None, True, timedelta(seconds=meeting.seconds), wait_for_workers=False
            )
        except RuntimeError as error:
            raise TransportUnable(f"no rendezvous at {meeting.host}: {str(error).splitlines()[0][:200]}") from error
        self._meeting = meeting
        self._device = device
        self._group: NcclGroup | None = None
        self._aborted = False
        self._buffers = GpuBuffers(device)

    def details(self, rank: int) -> dict[str, str]:
        shared = {name: os.environ[name] for name in _OF_BOTH_SIDES if name in os.environ}
        return {"address": self._meeting.host, "port": str(self._store.port), **shared}

    def gather(self, seconds: float) -> None:
        try:
            self._group = NcclGroup(self._store, self._meeting, 0, seconds, self._device)
        except RuntimeError as error:
            raise TransportBroken(str(error).splitlines()[0][:200]) from error
        if self._aborted:
            self._group.abort()

    def buffer(self, number: int, size: int) -> Any:
        return self._buffers.take(number, size)

    def load(self, number: int, pieces: Sequence[Any]) -> dict[str, str]:
        return {}

    def send(self, number: int, seconds: float) -> None:
        assert self._group is not None
        flat = self._buffers.taken(number)
        if flat.numel():
            self._group.broadcast([flat], seconds)

    def free(self, number: int) -> None:
        self._buffers.free(number)

    def abort(self) -> None:
        self._aborted = True
        if self._group is not None:
            self._group.abort()


class GpuBuffers:
    """Of torch's memory, used again for buckets that are not larger."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._idle: list[Any] = []
        self._taken: dict[int, tuple[Any, Any]] = {}

    def take(self, number: int, size: int) -> Any:
        """Raises TransportBroken when there is no memory."""
        import torch

        fitting = [one for one in self._idle if one.numel() >= size]
        if fitting:
            whole = min(fitting, key=lambda one: int(one.numel()))
            self._idle = [one for one in self._idle if one is not whole]
        else:
            self._idle.clear()
            try:
                whole = torch.empty(max(size, 1), dtype=torch.uint8, device=f"cuda:{self._device}")
            except torch.cuda.OutOfMemoryError as error:
                raise TransportBroken(f"no {size} bytes of GPU memory for a bucket: use smaller buckets") from error
        self._taken[number] = (whole, whole[:size])
        return whole[:size]

    def taken(self, number: int) -> Any:
        return self._taken[number][1]

    def free(self, number: int) -> None:
        if number in self._taken:
            self._idle.append(self._taken.pop(number)[0])


class NcclReceiver:
    gpu = True
    lanes = 1

    def __init__(self, meeting: Meeting, rank: int, details: Mapping[str, str], device: int) -> None:
        self._meeting, self._rank, self._details, self._device = meeting, rank, details, device
        self._group: NcclGroup | None = None
        self._aborted = False

    def join(self, seconds: float) -> None:
        from torch.distributed import TCPStore

        for name in _OF_BOTH_SIDES:
            if name in self._details:
                os.environ[name] = self._details[name]
        try:
            limit = timedelta(seconds=seconds)
            store = TCPStore(self._details["address"], int(self._details["port"]), None, False, limit)
            self._group = NcclGroup(store, self._meeting, self._rank, seconds, self._device)
        except (RuntimeError, KeyError, ValueError) as error:
            raise TransportBroken(str(error).splitlines()[0][:200]) from error
        if self._aborted:
            self._group.abort()

    def receive(self, bucket: Bucket, details: Mapping[str, str], target: Target, seconds: float) -> None:
        from ..gpu_bytes import flat_at

        assert self._group is not None
        if bucket.size:
            self._group.broadcast([flat_at(target.address, bucket.size)], seconds)

    def abort(self) -> None:
        self._aborted = True
        if self._group is not None:
            self._group.abort()
