"""A digest that a GPU computes in one pass over its memory: BLAKE2b over the sums of the 64-bit words of each block.
What two words of one block exchange is not seen; damage of memory and of transfers is."""

from __future__ import annotations

import hashlib
import struct

import numpy as np

NAME = "block-sums-64k"
BLOCK = 64 << 10  # bytes
WORD = 8


def digest_of_sums(sums: bytes, size: int) -> str:
    """sums: of each block, 64-bit little-endian, modulo 2**64; the last block and its last word filled with zeros.
    size: of all bytes."""
    return hashlib.blake2b(sums + struct.pack("<Q", size), digest_size=16).hexdigest()


class BlockSums:
    """In host memory, piece by piece."""

    def __init__(self) -> None:
        self._sums: list[bytes] = []
        self._rest = bytearray()
        self._size = 0

    def update(self, data: bytes | bytearray | memoryview, /) -> None:
        view = memoryview(data).cast("B")
        self._size += len(view)
        if self._rest:
            taken = min(BLOCK - len(self._rest), len(view))
            self._rest += view[:taken]
            view = view[taken:]
            if len(self._rest) < BLOCK:
                return
            self._add(np.frombuffer(self._rest, "<u8"))
            self._rest = bytearray()
        whole = len(view) // BLOCK * BLOCK
        if whole:
            self._add(np.frombuffer(view[:whole], np.uint8).view("<u8"))
        self._rest += view[whole:]

    def hexdigest(self) -> str:
        sums = list(self._sums)
        if self._rest:
            filled = bytes(self._rest) + bytes(-len(self._rest) % WORD)
            sums.append(np.frombuffer(filled, "<u8").sum(dtype=np.uint64).astype("<u8").tobytes())
        return digest_of_sums(b"".join(sums), self._size)

    def _add(self, words: np.ndarray) -> None:
        self._sums.append(words.reshape(-1, BLOCK // WORD).sum(axis=1, dtype=np.uint64).astype("<u8").tobytes())
