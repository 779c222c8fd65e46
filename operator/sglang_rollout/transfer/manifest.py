"""What a set of weights is: tensors by their checkpoint names, where each lies in its bucket, and a digest that names
all of it. Standard library only: the engine's hook reads manifests, too."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from .dtypes import DTYPES

FORMAT = 1
MAX_TENSORS = 1_000_000
MAX_NAME = 1024
MAX_RANK = 16
MAX_BYTES = 1 << 46  # of one set of weights
MAX_JSON = 512 << 20


class ManifestRefused(Exception):
    """These tensors cannot be moved; the sentence names the tensor and why."""


@dataclass(frozen=True)
class Tensor:
    """`dtype` as safetensors writes it, "BF16". The whole tensor, as a checkpoint has it, never a shard."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @cached_property
    def size(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        return f"{list(self.shape)} {self.dtype}"


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel together, without gaps, each at a multiple of its item size because those of the largest
    items come first. `digest` is of the bucket's bytes, by the manifest's algorithm."""

    tensors: tuple[Tensor, ...]
    digest: str = ""

    @cached_property
    def size(self) -> int:
        return sum(tensor.size for tensor in self.tensors)

    def placed(self) -> Iterator[tuple[Tensor, int]]:
        """Each tensor with its offset from the bucket's begin, in bytes."""
        offset = 0
        for tensor in self.tensors:
            yield tensor, offset
            offset += tensor.size


@dataclass(frozen=True)
class Manifest:
    """`aliases`: names that a checkpoint may hold besides, each with the tensor whose bytes it shares (a tied
    lm_head); they are never sent."""

    buckets: tuple[Bucket, ...]
    algorithm: str
    aliases: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(self)

    @property
    def size(self) -> int:
        return sum(bucket.size for bucket in self.buckets)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """By name, without the aliases."""
        return {tensor.name: tensor for bucket in self.buckets for tensor in bucket.tensors}

    @cached_property
    def root(self) -> str:
        """Digest of all of it, the buckets' digests included: the name of these bytes."""
        return root_of(self.to_json())

    @cached_property
    def layout(self) -> str:
        """Digest of names, shapes and element types alone, whatever their order: equal for the versions of one model,
        whoever sends them."""
        words = sorted([t.name, t.dtype, list(t.shape)] for bucket in self.buckets for t in bucket.tensors)
        return hashlib.blake2b(_canonical(words), digest_size=16).hexdigest()

    @cached_property
    def placing(self) -> str:
        """Digest of where everything lies in a slot."""
        words = [self.layout, [[tensor.name for tensor in bucket.tensors] for bucket in self.buckets]]
        return hashlib.blake2b(_canonical(words), digest_size=16).hexdigest()

    def work_out(self) -> None:
        """All digests, ahead of when they are needed."""
        assert self.root
        assert self.placing

    def to_json(self) -> bytes:
        """The one way to write it, so equal manifests have equal roots."""
        return self._json

    @cached_property
    def _json(self) -> bytes:
        return _canonical(
            {
                "format": FORMAT,
                "algorithm": self.algorithm,
                "aliases": dict(self.aliases),
                "buckets": [
                    {"digest": bucket.digest, "tensors": [(t.name, t.dtype, t.shape) for t in bucket.tensors]}
                    for bucket in self.buckets
                ],
            }
        )

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """Raises ManifestRefused for anything that to_json() cannot have written."""
        if len(data) > MAX_JSON:
            raise ManifestRefused(f"the manifest has {len(data)} bytes, more than the limit of {MAX_JSON}")
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ManifestRefused(f"the manifest is no JSON: {error}") from error
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise ManifestRefused(f"the manifest is not of format {FORMAT}: sender and receiver differ in release")
        try:
            return cls(
                tuple(
                    Bucket(tuple(tensor_of(*words) for words in bucket["tensors"]), _text(bucket["digest"]))
                    for bucket in value["buckets"]
                ),
                _text(value["algorithm"]),
                {_text(alias): _text(name) for alias, name in value["aliases"].items()},
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ManifestRefused(f"the manifest has another form than expected: {error!r}") from error


def root_of(manifest_json: bytes) -> str:
    return hashlib.blake2b(manifest_json, digest_size=32).hexdigest()


def tensor_of(name: Any, dtype: Any, shape: Any) -> Tensor:
    """A tensor from untrusted words. Raises ManifestRefused."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise ManifestRefused(f"tensor name {str(name)[:80]!r} is not a string of 1 to {MAX_NAME} characters")
    if dtype not in DTYPES:
        raise ManifestRefused(f"tensor {name} is of type {dtype!r}: use one of {', '.join(DTYPES)}")
    if not isinstance(shape, list | tuple) or len(shape) > MAX_RANK:
        raise ManifestRefused(f"tensor {name} has no shape of at most {MAX_RANK} dimensions")
    if not all(type(size) is int and 0 <= size <= MAX_BYTES for size in shape):
        raise ManifestRefused(f"tensor {name} has shape {shape}: dimensions are whole numbers from 0")
    return Tensor(name, dtype, tuple(shape))


def plan_buckets(tensors: Iterable[Tensor], bucket_bytes: int) -> Iterator[Bucket]:
    """Fills buckets of at most `bucket_bytes` in the given order, so that a sender can stream; a larger tensor gets
    a bucket of its own."""
    if bucket_bytes < 1:
        raise ValueError(f"a bucket of {bucket_bytes} bytes holds nothing")
    waiting: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if waiting and size + tensor.size > bucket_bytes:
            yield bucket_of(waiting)
            waiting, size = [], 0
        waiting.append(tensor)
        size += tensor.size
    if waiting:
        yield bucket_of(waiting)


def bucket_of(tensors: Sequence[Tensor]) -> Bucket:
    """In the order that keeps every offset aligned; equal sizes stay in the given order."""
    return Bucket(tuple(sorted(tensors, key=lambda tensor: -DTYPES[tensor.dtype].itemsize)))


def _check(manifest: Manifest) -> None:
    names: set[str] = set()
    for bucket in manifest.buckets:
        largest = 8
        for tensor in bucket.tensors:
            if tensor.name in names:
                raise ManifestRefused(f"tensor {tensor.name} is there twice: send each name once")
            names.add(tensor.name)
            itemsize = DTYPES[tensor.dtype].itemsize
            if itemsize > largest:
                raise ManifestRefused(f"tensor {tensor.name} stands behind one of smaller items in its bucket")
            largest = itemsize
    if not names:
        raise ManifestRefused("there are no tensors: send all tensors of the model")
    if len(names) > MAX_TENSORS:
        raise ManifestRefused(f"{len(names)} tensors are more than the limit of {MAX_TENSORS}")
    if manifest.size > MAX_BYTES:
        raise ManifestRefused(f"{manifest.size} bytes are more than the limit of {MAX_BYTES}")
    for alias, name in manifest.aliases.items():
        if alias in names:
            raise ManifestRefused(f"tensor {alias} is sent and also called an alias of {name}: choose one")
        if name not in names:
            raise ManifestRefused(f"alias {alias} stands for {name}, which is not among the tensors")


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ManifestRefused(f"the manifest has {value!r} where a string belongs")
    return value
