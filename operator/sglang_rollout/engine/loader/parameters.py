"""A model's parameters, found once: whether they are still where they were, and sums of their bytes, cheap enough for
every commit."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

WORD = 8


class Parameters:
    """Walking the modules and making views costs more than summing 16 GB on a GPU does, so both are kept."""

    def __init__(self, model: Any) -> None:
        named = {name: parameter.data for name, parameter in model.named_parameters()}
        self._places = [
            (module._parameters, name, parameter.data_ptr())
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        words = {name: _words(data) for name, data in named.items()}
        self._names = list(named)
        self._words = {name: flat for name, flat in words.items() if flat is not None}
        device = next(iter(self._words.values())).device if self._words else torch.device("cpu")
        self._sums = torch.zeros(len(self._words), dtype=torch.int64, device=device)
        self._places_of_sums = list(self._sums)

    def unmoved(self) -> bool:
        """The parameters still are the same memory; a loader that replaces them would make of views of the old ones
        something that nobody reads."""
        return all(
            (parameter := held.get(name)) is not None and parameter.data_ptr() == address
            for held, name, address in self._places
        )

    def order_sums(self) -> None:
        """Queues the sums behind what is queued already: nothing is waited for."""
        for flat, place in zip(self._words.values(), self._places_of_sums, strict=True):
            torch.sum(flat, dim=0, out=place)

    def ordered_sums(self) -> dict[str, int | None]:
        """Of each parameter, the sum of its 64-bit words modulo 2**64, as transfer.host_checks.word_sum; None for one
        that is not whole words in one piece. Shared parameters count once. Waits."""
        found: dict[str, int | None] = dict.fromkeys(self._names)
        found.update((n, value % (1 << 64)) for n, value in zip(self._words, self._sums.cpu().tolist(), strict=True))
        return found


def whole_sum(sums: dict[str, int | None]) -> int | None:
    known = [value for value in sums.values() if value is not None]
    return sum(known) % (1 << 64) if len(known) == len(sums) else None


def sums_digest(sums: dict[str, int | None]) -> str:
    return hashlib.blake2b(json.dumps(sums, sort_keys=True).encode(), digest_size=16).hexdigest()


def _words(data: Any) -> Any:
    if not data.numel() or not data.is_contiguous() or (data.numel() * data.element_size()) % WORD:
        return None
    if data.data_ptr() % WORD:
        return None
    return data.reshape(-1).view(torch.uint8).view(torch.int64)
