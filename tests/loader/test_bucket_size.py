"""How large buckets are when nobody says: by where the tensors are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_rollout.client.live import handed_over_at_once
from sglang_rollout.transfer.live_weights import LiveWeights
from sglang_rollout.transfer.outgoing import bucket_bytes_for, buckets_of

GIB = 1 << 30
TENSORS = {f"t{n}": torch.full((100,), n, dtype=torch.uint8) for n in range(4)}


@pytest.mark.parametrize(
    ("free", "reserved", "allocated", "size"),
    [
        (80 * GIB, 0, 0, GIB),
        (8 * GIB, 0, 0, GIB // 2),
        (2 * GIB, 8 * GIB, 2 * GIB, GIB // 2),  # what the allocator holds and nobody uses is free, too
        (GIB // 4, 0, 0, 64 << 20),
    ],
)
def test_on_a_gpu(monkeypatch: pytest.MonkeyPatch, free: int, reserved: int, allocated: int, size: int) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated)
    tensor: Any = SimpleNamespace(is_cuda=True, device="cuda:0")
    assert bucket_bytes_for(tensor) == size


@pytest.mark.parametrize(
    ("free", "whole", "size"),
    [
        (58 * GIB, 16 * GIB, 16 * GIB),
        (30 * GIB, 16 * GIB, 30 * GIB // 8),
        (58 * GIB, 0, 58 * GIB // 8),  # of an iterator it is not known
        (GIB // 4, GIB, 64 << 20),
    ],
)
def test_what_is_handed_over(free: int, whole: int, size: int) -> None:
    assert handed_over_at_once(free, whole) == size


def test_in_host_memory() -> None:
    assert bucket_bytes_for(TENSORS["t0"]) == 256 << 20
    assert [bucket.bucket.size for bucket in buckets_of(TENSORS.items(), None)] == [400]
    assert [bucket.bucket.size for bucket in buckets_of(TENSORS.items(), 200)] == [200, 200]


def test_what_goes_through_them_twice_cuts_them_alike() -> None:
    sizes = iter((200, 100))
    weights = LiveWeights(TENSORS, lambda first: next(sizes), lambda size, _: torch.empty(size, dtype=torch.uint8))
    assert [bucket.size for bucket in weights.survey().buckets] == [200, 200]
    assert [len(weights.flat(number)) for number in (0, 1, 0)] == [200, 200, 200]
