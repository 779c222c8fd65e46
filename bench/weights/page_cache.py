"""Takes files out of this machine's memory, and looks that they are out of it."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path


class StillCached(Exception):
    """Somebody maps the files, or they lie in memory anyway, as in a tmpfs."""


def drop(files: Iterable[Path]) -> None:
    """Raises StillCached, naming the file."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)  # what is not written yet cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            share = _share_cached(descriptor)
        finally:
            os.close(descriptor)
        if share:
            raise StillCached(f"{share:.1%} of {file} are still in memory")


def _share_cached(descriptor: int) -> float:
    """As mincore(2) counts pages."""
    size = os.fstat(descriptor).st_size
    if not size:
        return 0.0
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    # Private and writable, since ctypes takes no address of read-only memory; nothing is written.
    with mmap.mmap(descriptor, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
        first = ctypes.c_ubyte.from_buffer(mapped)
        failed = libc.mincore(ctypes.addressof(first), size, pages)
        del first
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(page & 1 for page in pages) / len(pages)
