"""What is computed over bytes in host memory: values that are Inf or NaN, and the sum that the engine's parameters are
held against. NumPy, in pieces that stay in the processor's cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .digests import new_hash
from .dtypes import DTYPES, Dtype
from .manifest import Bucket

CHUNK = 512 << 10  # bytes
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
WORD = 8


def nonfinite(data: memoryview, dtype: str) -> int:
    """How many elements are Inf or NaN. Either in a weight kills the engine at its next sampling."""
    kind = DTYPES[dtype]
    if not kind.nonfinite_mask:
        return 0
    elements: np.ndarray = np.frombuffer(data, _UNSIGNED[kind.itemsize])
    step = CHUNK // kind.itemsize
    found = 0
    for begin in range(0, elements.size, step):
        piece = elements[begin : begin + step]
        if _may_have(piece, kind):
            mask = np.array(kind.nonfinite_mask, piece.dtype)
            found += int(np.count_nonzero((piece & mask) == mask))
    return found


def _may_have(piece: np.ndarray, kind: Dtype) -> bool:
    """By the largest of each sign, which takes no memory: as integers, Inf and NaN are above all that is finite."""
    mask, sign = kind.nonfinite_mask, 1 << (8 * kind.itemsize - 1)
    if piece.max() >= mask | sign:
        return True
    return not mask & sign and bool(piece.view(_SIGNED[kind.itemsize]).max() >= mask)


@dataclass(frozen=True)
class Checked:
    """Of one bucket's bytes. `nonfinite`: counts by name, of the tensors that have any."""

    digest: str
    nonfinite: dict[str, int]
    word_sum: int


def check_bucket(data: memoryview, bucket: Bucket, algorithm: str) -> Checked:
    """All of it in one pass over memory. Raises UnknownDigest."""
    state = new_hash(algorithm)
    bad: dict[str, int] = {}
    total = 0
    for tensor, offset in bucket.placed():
        for begin in range(offset, offset + tensor.size, CHUNK):
            piece = data[begin : min(begin + CHUNK, offset + tensor.size)]
            state.update(piece)
            total += word_sum(piece)
            if count := nonfinite(piece, tensor.dtype):
                bad[tensor.name] = bad.get(tensor.name, 0) + count
    return Checked(state.hexdigest(), bad, total % (1 << 64))


def word_sum(data: memoryview) -> int:
    """Sum of the 64-bit little-endian words, modulo 2**64. Bytes that do not fill a word count as one with zeros.

    Rows of whole words may be cut and joined in any order, as tensor parallelism does, without changing it."""
    whole = len(data) // WORD * WORD
    words: np.ndarray = np.frombuffer(data[:whole], "<u8")
    rest = int.from_bytes(bytes(data[whole:]), "little")
    return (int(words.sum(dtype=np.uint64)) + rest) % (1 << 64)
