"""Sending into paused engines, from the thread that agents talk to. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from ..transfer.giving import EngineGroups, Giving, HandingOver
from ..transfer.handover import give_back, shareable
from ..transfer.link import Link
from ..transfer.live_sender import LiveSender, LiveSending
from ..transfer.live_weights import LiveWeights
from ..transfer.outgoing import LEAST_GPU_BUCKET, bucket_bytes_for, free_bytes
from ..transfer.session import Hello
from .room import SenderRoom

BY_VALUE_BYTES = 32 << 20  # of a bucket that travels as text in a request
WHOLE_SHARE = 2  # of free memory that all weights in one bucket may take
PART_SHARE = 8  # of free memory that a bucket may take otherwise: as many may be lent at once as engines ask


def live_job(
    room: SenderRoom,
    version: str,
    tensors: Mapping[str, Any] | Callable[[], Iterable[tuple[str, Any]]],
    *,
    colocated: bool,
    bucket_bytes: int | None,
    host: str,
    timeout: float,
) -> Coroutine[Any, Any, None]:
    """Looks at all tensors in the caller's thread, then returns what serves them until it is cancelled; that raises
    WrongForEngine. Raises ManifestRefused."""

    def size(first: Any) -> int:
        if not colocated:
            return bucket_bytes or bucket_bytes_for(first)
        if not first.is_cuda:
            return min(bucket_bytes or BY_VALUE_BYTES, BY_VALUE_BYTES)
        return bucket_bytes or handed_over_at_once(free_bytes(first.device), whole)

    named = tensors.values() if isinstance(tensors, Mapping) else ()
    whole = sum(getattr(tensor, "nbytes", 0) for tensor in named)  # what is no tensor is refused by survey()
    weights = LiveWeights(tensors, size, shareable if colocated else _buffer)
    weights.survey()
    groups = room.live_groups = room.live_groups or EngineGroups(host)

    def opened(link: Link, hello: Hello) -> Giving:
        return HandingOver(weights, hello.ranks) if colocated else groups.open(weights, link, hello)

    mode = "colocated" if colocated else "direct"
    sender = LiveSender(LiveSending(version, mode, weights, opened, groups.keep, timeout))

    async def serve() -> None:
        try:
            await sender.serve(room.reception)
        finally:
            weights.forget()
            if colocated:
                give_back()

    return serve()


def handed_over_at_once(free: int, whole: int) -> int:
    """Bytes of a bucket: each costs a paused engine some 9 ms (docs/performance.md). free: of the GPU's memory. whole:
    of all weights, 0 if that is not known."""
    return whole if 0 < whole <= free // WHOLE_SHARE else max(LEAST_GPU_BUCKET, free // PART_SHARE)


def _buffer(size: int, device: Any) -> Any:
    import torch

    return torch.empty(size, dtype=torch.uint8, device=device)
