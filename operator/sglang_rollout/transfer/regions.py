"""Host memory through which bytes get into a region of the stage, wherever that lies."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .cuda_driver import CudaDriver, CudaError
from .stage_index import Region, StageUnusable

PIECE = 4 << 20  # bytes: what goes through host memory at once is fast up to this size

log = logging.getLogger(__name__)


class OpenRegion(Protocol):
    """Windows of one region may be open at once in several threads if they do not overlap."""

    def window(self, begin: int, size: int) -> object:
        """A context manager of a writable memoryview; on exit without an error its bytes are in the region."""
        ...

    def look(self, begin: int, size: int) -> AbstractContextManager[memoryview]:
        """The bytes as they are now, to be read."""
        ...

    def close(self) -> None: ...


class HostRegion:
    """A file in shared memory, mapped."""

    def __init__(self, path: Path, size: int) -> None:
        with path.open("r+b") as file:
            if os.fstat(file.fileno()).st_size < size:
                raise StageUnusable(f"{path} is shorter than the {size} bytes that the index says")
            self._map = mmap.mmap(file.fileno(), size)
        self._view = memoryview(self._map)

    @contextmanager
    def window(self, begin: int, size: int) -> Iterator[memoryview]:
        with self._view[begin : begin + size] as view:
            yield view

    def look(self, begin: int, size: int) -> AbstractContextManager[memoryview]:
        return self._view[begin : begin + size].toreadonly()

    def close(self) -> None:
        """Windows that are still open stay whole: the memory is let go with the last of them."""
        self._view.release()
        with suppress(BufferError):
            self._map.close()


class PinnedBuffers:
    """Host buffers of PIECE bytes that a GPU copies from and to at the speed of its link. As many as were lent at once,
    made when they are needed and used again."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._free: list[_Buffer] = []
        self._closed = False

    @contextmanager
    def lend(self) -> Iterator[_Buffer]:
        """From any thread."""
        with self._lock:
            buffer = self._free.pop() if self._free else None
        if buffer is None:
            buffer = self._made()
        try:
            yield buffer
        finally:
            with self._lock:
                kept = not self._closed
                if kept:
                    self._free.append(buffer)
            if not kept:
                self._let_go(buffer)

    def close(self) -> None:
        """Those that are still lent go when they come back."""
        with self._lock:
            self._closed = True
            free, self._free = self._free, []
        for buffer in free:
            self._let_go(buffer)

    def _made(self) -> _Buffer:
        memory = mmap.mmap(-1, PIECE)
        address = ctypes.addressof((ctypes.c_char * PIECE).from_buffer(memory))
        try:
            self._driver.register(address, PIECE)
        except CudaError as error:
            log.warning("copies between host and GPU are slow, because memory cannot be pinned: %s", error)
            return _Buffer(memory, address, pinned=False)
        return _Buffer(memory, address, pinned=True)

    def _let_go(self, buffer: _Buffer) -> None:
        if buffer.pinned:
            self._driver.unregister(buffer.address)


@dataclass(frozen=True)
class _Buffer:
    memory: mmap.mmap
    address: int
    pinned: bool


class DeviceRegion:
    """GPU memory of a holder process. Each window is a host buffer, copied over on exit; those of at most PIECE bytes
    are fast."""

    def __init__(self, driver: CudaDriver, handle: str) -> None:
        self._driver = driver
        self._address = driver.open(handle)
        self._buffers = PinnedBuffers(driver)

    def address(self, begin: int) -> int:
        """In this process."""
        return self._address + begin

    @contextmanager
    def window(self, begin: int, size: int) -> Iterator[memoryview]:
        with self._host(size) as (view, address):
            yield view
            if size:
                self._driver.copy_in(self._address + begin, address, size)

    @contextmanager
    def look(self, begin: int, size: int) -> Iterator[memoryview]:
        with self._host(size) as (view, address):
            if size:
                self._driver.copy_out(address, self._address + begin, size)
            with view.toreadonly() as seen:
                yield seen

    @contextmanager
    def _host(self, size: int) -> Iterator[tuple[memoryview, int]]:
        if size <= PIECE:
            with self._buffers.lend() as lent, memoryview(lent.memory) as whole, whole[:size] as view:
                yield view, lent.address
        else:
            buffer = bytearray(size)
            with memoryview(buffer) as view:
                yield view, ctypes.addressof((ctypes.c_char * size).from_buffer(buffer))

    def close(self) -> None:
        self._buffers.close()
        self._driver.close(self._address)


def reserve_file(path: Path, size: int) -> None:
    """A file of shared memory whose pages are all there: writing into a full tmpfs kills with SIGBUS, this raises
    StageUnusable."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(descriptor).st_size != size:
            os.ftruncate(descriptor, 0)
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        path.unlink(missing_ok=True)
        free = os.statvfs(path.parent)
        raise StageUnusable(
            f"{path.parent} has no room for a stage of {size} bytes ({free.f_bavail * free.f_frsize} are free): raise "
            f"engine.sharedMemorySize ({error.strerror})"
        ) from error
    finally:
        os.close(descriptor)


def identity_of(folder: Path, region: Region) -> tuple[object, ...]:
    """What tells this memory from another of the same name. Raises StageUnusable."""
    if not region.path:
        return (region.gpu, region.handle)
    try:
        found = os.stat(folder / region.path)
    except OSError as error:
        raise StageUnusable(f"the stage's memory {region.path} is gone: {error.strerror}") from error
    return (found.st_dev, found.st_ino, region.size)


def open_region(folder: Path, region: Region, driver: CudaDriver | None = None) -> HostRegion | DeviceRegion:
    """`driver` for GPU memory. Raises StageUnusable, OSError, CudaError."""
    if region.path:
        return HostRegion(folder / region.path, region.size)
    if driver is None:
        raise StageUnusable("the stage is in GPU memory and this process uses no GPU")
    return DeviceRegion(driver, region.handle)
