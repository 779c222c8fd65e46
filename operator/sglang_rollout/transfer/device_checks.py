"""The checks of host_checks over bytes in GPU memory, computed there: two passes at the speed of the memory. Needs
torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .block_sums import BLOCK, NAME, WORD, digest_of_sums
from .digests import UnknownDigest
from .dtypes import DTYPES
from .gpu_bytes import flat_at
from .host_checks import Checked
from .manifest import Bucket, Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def block_sums(flat: Any) -> Any:
    """Of flat bytes: int64, wrapped, one for each block, where the bytes are."""
    size = flat.numel()
    whole = size // BLOCK * BLOCK
    sums = [flat[:whole].view(torch.int64).view(-1, BLOCK // WORD).sum(dim=1)] if whole else []
    if rest := size - whole:
        padded = torch.zeros(-(-rest // WORD) * WORD, dtype=torch.uint8, device=flat.device)
        padded[:rest] = flat[whole:]
        sums.append(padded.view(torch.int64).sum().view(1))
    return torch.cat(sums) if sums else torch.zeros(0, dtype=torch.int64, device=flat.device)


def digest_flat(algorithm: str, flat: Any) -> str:
    """Raises UnknownDigest."""
    if algorithm != NAME:
        raise UnknownDigest(f"digest {algorithm!r} is not computed on a GPU: use {NAME}")
    return digest_of_sums(block_sums(flat).cpu().numpy().astype("<i8").tobytes(), flat.numel())


def check_flat(flat: Any, bucket: Bucket, algorithm: str) -> Checked:
    """As host_checks.check_bucket. word_sum only means something where all tensors are whole words. Raises
    UnknownDigest."""
    return check_flats([(flat, bucket)], algorithm)[0]


def check_addresses(placed: Sequence[tuple[int, Bucket]], algorithm: str) -> list[Checked]:
    """As check_flats(), of buckets that lie at these addresses."""
    return check_flats([(flat_at(address, bucket.size), bucket) for address, bucket in placed], algorithm)


def check_flats(flats: Sequence[tuple[Any, Bucket]], algorithm: str) -> list[Checked]:
    """check_flat() of several, of one GPU. It is waited for once for all of them, since another process that computes
    there is made to wait each time."""
    if algorithm != NAME:
        raise UnknownDigest(f"digest {algorithm!r} is not computed on a GPU: use {NAME}")
    begun = [_Begun(flat, bucket) for flat, bucket in flats]
    if not begun:
        return []
    words = torch.cat([one.words() for one in begun]).cpu().numpy()
    found = []
    for one in begun:
        found.append(one.found(words[: one.count]))
        words = words[one.count :]
    return found


class _Begun:
    """The two passes over one bucket, as they are ordered from the GPU."""

    def __init__(self, flat: Any, bucket: Bucket) -> None:
        self._flat = flat
        self._runs = list(_float_runs(bucket))
        self._sums = block_sums(flat)
        self._marks = [_mark(flat[begin:end], tensors[0][0].dtype) for begin, end, tensors in self._runs]
        self.count = len(self._sums) + len(self._marks)

    def words(self) -> Any:
        """What found() takes, int64 where the bytes are."""
        return torch.cat([self._sums, torch.stack(self._marks).long()]) if self._marks else self._sums

    def found(self, words: Any) -> Checked:
        bad = {}
        for (_, _, tensors), odd in zip(self._runs, words[len(self._sums) :], strict=True):
            for tensor, offset in tensors if odd else ():
                if count := _count(self._flat[offset : offset + tensor.size], tensor.dtype):
                    bad[tensor.name] = count
        host = words[: len(self._sums)].astype("<i8")
        total = int(host.view("<u8").sum(dtype="uint64"))
        return Checked(digest_of_sums(host.tobytes(), self._flat.numel()), bad, total)


def _float_runs(bucket: Bucket) -> Iterator[tuple[int, int, list[tuple[Tensor, int]]]]:
    """Begin and end of neighbours of one element type, and these: a pass over each tensor alone costs more than it
    takes."""
    placed = [(tensor, offset) for tensor, offset in bucket.placed() if tensor.size]
    for dtype, group in itertools.groupby(placed, lambda one: one[0].dtype):
        tensors = list(group)
        if DTYPES[dtype].nonfinite_mask:
            last, offset = tensors[-1]
            yield tensors[0][1], offset + last.size, tensors


def _mark(flat: Any, dtype: str) -> Any:
    """Whether there may be an Inf or NaN: a sum has it, too, and takes one pass. It may be so for nothing, where
    large values add up to more than a float holds."""
    kind = DTYPES[dtype]
    if kind.itemsize == 1:
        return _bits(flat, dtype).any()
    values = flat.view(getattr(torch, kind.torch))
    return ~torch.isfinite(values.sum(dtype=torch.float64 if kind.itemsize == 8 else torch.float32))


def _count(flat: Any, dtype: str) -> int:
    return int(_bits(flat, dtype).sum())


def _bits(flat: Any, dtype: str) -> Any:
    kind = DTYPES[dtype]
    mask = kind.nonfinite_mask
    return (flat.view(_INTEGERS[kind.itemsize]) & mask) == mask
