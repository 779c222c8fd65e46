"""A trainer's tensors as buckets of bytes that are ready to be sent. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from .device_checks import digest_flat
from .digests import new_hash
from .dtypes import DTYPES
from .manifest import Bucket, ManifestRefused, Tensor, bucket_of, tensor_of
from .transports import pieces_of

HOST_BUCKET = 256 << 20
GPU_BUCKET = 1 << 30
LEAST_GPU_BUCKET = 64 << 20
LARGE = 1 << 20  # of a tensor: ordering a copy of its own takes less than copying it
GPU_SHARE = 16  # of free memory that one bucket may take: four are kept at once

_NAMES = {getattr(torch, kind.torch): name for name, kind in DTYPES.items() if hasattr(torch, kind.torch)}


def described(name: str, tensor: Any) -> Tensor:
    """Raises ManifestRefused for what cannot be sent."""
    if not isinstance(tensor, torch.Tensor):
        raise ManifestRefused(f"{name!r} is a {type(tensor).__name__}: send torch tensors")
    if tensor.device.type not in ("cpu", "cuda"):
        raise ManifestRefused(f"tensor {name} is on device {tensor.device}, it holds no bytes to send: materialise it")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ManifestRefused(f"tensor {name} is {tensor.layout} and not plain and dense: send it as such")
    if type(tensor).__name__ == "DTensor":
        raise ManifestRefused(f"tensor {name} is a shard (DTensor): gather it first, with full_tensor()")
    if tensor.dtype not in _NAMES:
        raise ManifestRefused(f"tensor {name} is of type {tensor.dtype}: use one of {', '.join(DTYPES)}")
    if not tensor.is_contiguous():
        raise ManifestRefused(f"tensor {name} is not contiguous: send tensor.contiguous()")
    return tensor_of(name, _NAMES[tensor.dtype], list(tensor.shape))


def bucket_bytes_for(tensor: torch.Tensor) -> int:
    """What suits where the tensor is: each bucket costs a decoding GPU about as much time, so few large ones are good
    there (docs/performance.md); in host memory larger ones win nothing."""
    if not tensor.is_cuda:
        return HOST_BUCKET
    return max(LEAST_GPU_BUCKET, min(GPU_BUCKET, free_bytes(tensor.device) // GPU_SHARE))


def free_bytes(device: torch.device) -> int:
    """Of a GPU's memory, for this process."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def buckets_of(
    named: Iterable[tuple[str, Any]], bucket_bytes: int | Callable[[torch.Tensor], int] | None
) -> Iterator[TensorBucket]:
    """As the tensors come; one that is larger than a bucket gets one of its own. bucket_bytes: a function tells it from
    the first tensor; None: bucket_bytes_for(). Raises ManifestRefused."""
    waiting: list[tuple[Tensor, torch.Tensor]] = []
    size = limit = 0
    seen: set[str] = set()
    for name, tensor in named:
        one = described(name, tensor)
        if name in seen:
            raise ManifestRefused(f"tensor {name} is there twice: send each name once")
        seen.add(name)
        limit = limit or _limit(bucket_bytes, tensor)
        if waiting and size + one.size > limit:
            yield TensorBucket(waiting)
            waiting, size = [], 0
        waiting.append((one, tensor.detach()))
        size += one.size
    if waiting:
        yield TensorBucket(waiting)


def _limit(bucket_bytes: int | Callable[[torch.Tensor], int] | None, first: torch.Tensor) -> int:
    return bucket_bytes if isinstance(bucket_bytes, int) else (bucket_bytes or bucket_bytes_for)(first)


class TensorBucket:
    """Tensors in a bucket's order. They must not be written again before they are sent."""

    def __init__(self, tensors: Sequence[tuple[Tensor, torch.Tensor]]) -> None:
        self.bucket: Bucket = bucket_of([one for one, _ in tensors])
        by_name = {one.name: tensor for one, tensor in tensors}
        self._tensors = [by_name[one.name] for one in self.bucket.tensors]
        # What computes them may still be under way on the stream of whoever made them.
        self._made = [
            torch.cuda.current_stream(device).record_event()
            for device in {t.device for t in self._tensors if t.device.type == "cuda"}
        ]

    @property
    def device(self) -> torch.device:
        """Where the first of them is."""
        return self._tensors[0].device

    def pieces(self) -> list[torch.Tensor]:
        """Flat tensors of bytes in host memory, as pieces_of() cuts the bucket; large ones where they lie."""
        for event in self._made:
            event.synchronize()
        flat = [_on_host(tensor.reshape(-1).view(torch.uint8)) for tensor in self._tensors]
        offsets = [offset for _, offset in self.bucket.placed()]
        found = []
        for begin, size in pieces_of(self.bucket):
            inside = [
                one for one, offset in zip(flat, offsets, strict=True) if begin <= offset < begin + size and len(one)
            ]
            found.append(inside[0] if len(inside) == 1 else torch.cat(inside))
        return found

    def write_flat(self, into: torch.Tensor, algorithm: str = "") -> str:
        """Everything in one piece, `into` a buffer of bucket.size bytes (torch.uint8) anywhere. The bytes are there
        when it returns: their digest, or "" without an algorithm."""
        for event in self._made:
            event.synchronize()
        _copy_together(into, self._tensors, [offset for _, offset in self.bucket.placed()])
        found = self.digest(algorithm, [into]) if algorithm else ""
        if into.device.type == "cuda" and not found:
            torch.cuda.current_stream(into.device).synchronize()
        return found

    def digest(self, algorithm: str, pieces: Sequence[torch.Tensor]) -> str:
        """Of pieces in host memory, or of one that is on a GPU and holds all."""
        if pieces and pieces[0].is_cuda:
            return digest_flat(algorithm, pieces[0])
        state = new_hash(algorithm)
        for piece in pieces:
            state.update(memoryview(piece.numpy()))
        return state.hexdigest()


def _copy_together(into: torch.Tensor, tensors: Sequence[torch.Tensor], offsets: Sequence[int]) -> None:
    """Only ordered where `into` is on a GPU. Small tensors of the same GPU go in few kernels, of one element type each;
    large ones each in a copy of its own, at the speed of the memory."""
    ordered: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for tensor, offset in zip(tensors, offsets, strict=True):
        flat = tensor.reshape(-1)
        target = into[offset : offset + flat.nbytes]
        if into.is_cuda and tensor.device == into.device and flat.nbytes < LARGE:
            targets, sources = ordered.setdefault(tensor.dtype, ([], []))
            targets.append(target.view(tensor.dtype))
            sources.append(flat)
        else:
            target.copy_(flat.view(torch.uint8), non_blocking=into.is_cuda)
    for targets, sources in ordered.values():
        torch._foreach_copy_(targets, sources)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return host
