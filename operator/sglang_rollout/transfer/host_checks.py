"""What is computed over bytes in host memory: values that are Inf or NaN, and the sum that the engine's parameters are
held against. NumPy, in pieces that stay in the processor's cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .digests import new_hash
from .dtypes import DTYPES, Dtype
from .manifest import Bucket, Tensor

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


@dataclass(frozen=True)
class Span:
    """Bytes of a bucket that follow each other: whole tensors, and parts of large ones. `parts`: tensor, and where its
    bytes begin and end within the span."""

    begin: int
    size: int
    parts: tuple[tuple[Tensor, int, int], ...]


def spans(bucket: Bucket, most: int) -> Iterator[Span]:
    """All of the bucket in order, cut where checks can be cut; each of `most` bytes or less, at least CHUNK."""
    begin, size, parts = 0, 0, list[tuple[Tensor, int, int]]()
    for tensor, offset in bucket.placed():
        for start in range(offset, offset + tensor.size, CHUNK):
            length = min(CHUNK, offset + tensor.size - start)
            if size + length > most:
                yield Span(begin, size, tuple(parts))
                begin, size, parts = start, 0, []
            parts.append((tensor, size, size + length))
            size += length
    if parts:
        yield Span(begin, size, tuple(parts))


class BucketCheck:
    """Of one bucket's bytes, span by span in their order."""

    def __init__(self, algorithm: str) -> None:
        """Raises UnknownDigest."""
        self._state = new_hash(algorithm)
        self._bad: dict[str, int] = {}
        self._total = 0

    def add(self, data: memoryview, span: Span) -> None:
        """data: of this span alone."""
        for tensor, begin, end in span.parts:
            piece = data[begin:end]
            self._state.update(piece)
            self._total += word_sum(piece)
            if count := nonfinite(piece, tensor.dtype):
                self._bad[tensor.name] = self._bad.get(tensor.name, 0) + count

    def found(self) -> Checked:
        return Checked(self._state.hexdigest(), self._bad, self._total % (1 << 64))


def check_bucket(data: memoryview, bucket: Bucket, algorithm: str) -> Checked:
    """All of it in one pass over memory. Raises UnknownDigest."""
    check = BucketCheck(algorithm)
    for span in spans(bucket, CHUNK):
        check.add(data[span.begin : span.begin + span.size], span)
    return check.found()


def word_sum(data: memoryview) -> int:
    """Sum of the 64-bit little-endian words, modulo 2**64. Bytes that do not fill a word count as one with zeros.

    Rows of whole words may be cut and joined in any order, as tensor parallelism does, without changing it."""
    whole = len(data) // WORD * WORD
    words: np.ndarray = np.frombuffer(data[:whole], "<u8")
    rest = int.from_bytes(bytes(data[whole:]), "little")
    return (int(words.sum(dtype=np.uint64)) + rest) % (1 << 64)
