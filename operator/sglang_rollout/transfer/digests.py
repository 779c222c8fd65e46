"""Digests of buckets: XXH3 where the xxhash package is there (SGLang's own environment has it), else BLAKE2b, ten to
twenty times slower; on GPUs, sums of blocks. They find damage, not malice: who may send is decided by tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Protocol

XXH3 = "xxh3-128"
BLAKE2B = "blake2b-128"
BLOCK_SUMS = "block-sums-64k"


class Hash(Protocol):
    def update(self, data: Any, /) -> None: ...
    def hexdigest(self) -> str: ...


class UnknownDigest(Exception):
    """The other side's algorithm is not available here."""


def _block_sums() -> Hash:
    from .block_sums import BlockSums  # needs NumPy, which not everyone who names digests has

    return BlockSums()


def _algorithms() -> dict[str, Callable[[], Hash]]:
    found: dict[str, Callable[[], Hash]] = {
        BLAKE2B: lambda: hashlib.blake2b(digest_size=16),
        BLOCK_SUMS: _block_sums,
    }
    try:
        import xxhash
    except ImportError:
        return found
    return {XXH3: xxhash.xxh3_128, **found}


ALGORITHMS = _algorithms()
"""By name, the fastest first."""


def new_hash(algorithm: str) -> Hash:
    """Raises UnknownDigest."""
    if algorithm not in ALGORITHMS:
        raise UnknownDigest(f"digest {algorithm!r} cannot be computed here: use one of {', '.join(ALGORITHMS)}")
    return ALGORITHMS[algorithm]()


def digest(algorithm: str, data: memoryview) -> str:
    """Raises UnknownDigest."""
    state = new_hash(algorithm)
    state.update(data)
    return state.hexdigest()
