"""A trainer's tensors given again and again, and as SGLang opens them."""

from __future__ import annotations

import pickle
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sglang_rollout.transfer.handover import Entries
from sglang_rollout.transfer.live_weights import LiveWeights, WeightsChanged
from sglang_rollout.transfer.manifest import ManifestRefused


def some() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "a": torch.randn(4, 8, generator=generator).bfloat16(),
        "b": torch.randn(3, generator=generator),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 4),
        "c": torch.randn(5, 5, generator=generator),
    }


def host(size: int, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


class Memory:
    """Host memory that knows which of its buffers are still there."""

    def __init__(self) -> None:
        self._given: list[weakref.ref[torch.Tensor]] = []

    def allocate(self, size: int, device: torch.device) -> torch.Tensor:
        flat = host(size, device)
        self._given.append(weakref.ref(flat))
        return flat

    def held(self) -> int:
        return sum(one() is not None for one in self._given)


def surveyed(tensors: Any, bucket_bytes: int = 70) -> LiveWeights:
    weights = LiveWeights(tensors, bucket_bytes, host)
    weights.survey()
    return weights


def read_back(weights: LiveWeights, numbers: list[int]) -> dict[str, torch.Tensor]:
    found = {}
    for number in numbers:
        flat = weights.flat(number)
        for tensor, offset in weights.manifest.buckets[number].placed():
            given = some()[tensor.name]
            found[tensor.name] = flat[offset : offset + tensor.size].view(given.dtype).view(given.shape)
    return found


@pytest.mark.parametrize("lazily", [False, True])
def test_every_bucket_is_given_in_any_order_and_again(lazily: bool) -> None:
    tensors = some()

    def one_by_one() -> Iterator[tuple[str, torch.Tensor]]:
        yield from tensors.items()

    weights = surveyed(one_by_one if lazily else tensors)
    count = len(weights.manifest.buckets)
    assert count >= 3
    for order in ([*range(count)], [*reversed(range(count))], [0, 0, count - 1, 0]):
        for name, tensor in read_back(weights, order).items():
            assert torch.equal(tensor, tensors[name])


def test_the_root_is_of_names_and_bytes() -> None:
    tensors = some()
    root = surveyed(tensors).manifest.root
    assert surveyed(some()).manifest.root == root
    tensors["c"][0, 0] += 1
    assert surveyed(tensors).manifest.root != root


def test_changes_are_noticed() -> None:
    tensors = some()
    weights = surveyed(tensors)
    tensors["c"][4, 4] *= 1.001
    with pytest.raises(WeightsChanged, match="values of c"):
        read_back(weights, [*range(len(weights.manifest.buckets))])
    shrinking = [some(), {name: t for name, t in some().items() if name != "c"}, {**some(), "c": torch.zeros(5, 6)}]
    weights = surveyed(lambda: shrinking.pop(0).items())
    for sentence in ("2 buckets, and 3 at first", "other tensors"):
        with pytest.raises(WeightsChanged, match=sentence):
            weights.flat(len(weights.manifest.buckets) - 1)


def test_the_first_bucket_is_as_it_was_told_of() -> None:
    """It is not made twice: whoever asks gets what was looked at, though the tensor has changed since."""
    tensors = some()
    weights = surveyed(tensors)
    first = weights.manifest.buckets[0].tensors[0].name
    tensors[first].add_(1)
    assert torch.equal(read_back(weights, [0])[first], some()[first])
    weights.flat(2)
    with pytest.raises(WeightsChanged, match=f"values of .*{first}"):
        weights.flat(0)


def test_what_is_forgotten_is_freed_and_not_made_anew() -> None:
    memory = Memory()
    weights = LiveWeights(some(), 70, memory.allocate)
    weights.survey()
    count = len(weights.manifest.buckets)
    weights.flat(count - 1)
    assert memory.held() > 0
    weights.forget()
    assert memory.held() == 0
    for number in range(count):
        with pytest.raises(WeightsChanged, match="not given any more"):
            weights.flat(number)
    assert memory.held() == 0


def test_nobody_waits_for_an_iterator_of_the_trainer_s_to_forget() -> None:
    """It may stand for ever, in a collective that other ranks do not come to; what it gives in the end is freed."""
    inside, goes_on = threading.Event(), threading.Event()
    passes = 0
    memory = Memory()

    def one_by_one() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal passes
        passes += 1
        if passes > 1:
            inside.set()
            assert goes_on.wait(10)
        yield from some().items()

    weights = LiveWeights(one_by_one, 70, memory.allocate)
    weights.survey()
    maker = threading.Thread(target=weights.flat, args=(len(weights.manifest.buckets) - 1,))
    maker.start()
    assert inside.wait(10)
    forgetter = threading.Thread(target=weights.forget)
    forgetter.start()
    forgetter.join(10)
    try:
        assert not forgetter.is_alive()
    finally:
        goes_on.set()
        maker.join(10)
    assert memory.held() == 0


def test_values_that_are_not_finite_are_counted() -> None:
    tensors = some()
    tensors["a"][0, :2] = float("inf")
    assert surveyed(tensors).nonfinite_words() == "a (2)"


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({}, "no tensors"),
        ({"a": torch.zeros(2, dtype=torch.complex64)}, "type torch.complex64"),
        ({"a": torch.empty(2, device="meta")}, "no bytes to send"),
        (lambda: [("a", torch.zeros(1)), ("a", torch.zeros(1))], "twice"),
        ({"a": [1.0]}, "send torch tensors"),
    ],
)
def test_what_cannot_be_sent_is_refused(tensors: Any, sentence: str) -> None:
    with pytest.raises(ManifestRefused, match=sentence):
        surveyed(tensors)


def test_an_entry_is_a_pickle_of_sglang_s_own_classes() -> None:
    bucket_module = pytest.importorskip("sglang.srt.weight_sync.tensor_bucket")
    weights = surveyed(some(), 10_000)
    entries = Entries(weights.manifest.buckets[0])
    first = entries.entry(weights.flat(0))
    assert first == entries.entry(weights.flat(0))
    opened = pickle.loads(first)
    assert all(type(one) is bucket_module.FlattenedTensorMetadata for one in opened["metadata"])
    bucket = bucket_module.FlattenedTensorBucket(
        flattened_tensor=opened["flattened_tensor"], metadata=opened["metadata"]
    )
    found = dict(bucket.reconstruct_tensors())
    assert found.keys() == some().keys()
    assert all(torch.equal(tensor, some()[name]) for name, tensor in found.items())
