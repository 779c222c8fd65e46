"""Sums of the parameters' bytes as they lie on the device: cheap enough for every commit."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

WORD = 8


def parameter_sums(model: Any) -> dict[str, int | None]:
    """Of each parameter, the sum of its 64-bit words modulo 2**64, as transfer.host_checks.word_sum; None for one
    that is not whole words in one piece. Shared parameters count once."""
    named = {name: p.data for name, p in model.named_parameters()}
    words = {name: _words(data) for name, data in named.items()}
    kept = [name for name, flat in words.items() if flat is not None]
    sums: dict[str, int | None] = dict.fromkeys(named)
    if kept:
        # One wait for all of them.
        together = torch.stack([words[name].sum() for name in kept]).cpu().tolist()
        sums.update((name, value % (1 << 64)) for name, value in zip(kept, together, strict=True))
    return sums


def whole_sum(sums: dict[str, int | None]) -> int | None:
    known = [value for value in sums.values() if value is not None]
    return sum(known) % (1 << 64) if len(known) == len(sums) else None


def sums_digest(sums: dict[str, int | None]) -> str:
    return hashlib.blake2b(json.dumps(sums, sort_keys=True).encode(), digest_size=16).hexdigest()


def _words(data: Any) -> Any:
    if not data.is_contiguous() or (data.numel() * data.element_size()) % WORD or data.data_ptr() % WORD:
        return None
    return data.reshape(-1).view(torch.uint8).view(torch.int64)
