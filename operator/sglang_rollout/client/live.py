"""Sending into paused engines, from the thread that agents talk to. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from ..transfer.giving import EngineGroups, Giving, HandingOver
from ..transfer.handover import shareable
from ..transfer.link import Link
from ..transfer.live_sender import LiveSender, LiveSending
from ..transfer.live_weights import LiveWeights
from ..transfer.outgoing import bucket_bytes_for
from ..transfer.session import Hello
from .room import SenderRoom

BY_VALUE_BYTES = 32 << 20  # of a bucket that travels as text in a request


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
        wanted = bucket_bytes or bucket_bytes_for(first)
        return min(wanted, BY_VALUE_BYTES) if colocated and not first.is_cuda else wanted

    weights = LiveWeights(tensors, size, shareable if colocated else _buffer)
    weights.survey()
    groups = room.live_groups = room.live_groups or EngineGroups(host)

    def opened(link: Link, hello: Hello) -> Giving:
        return HandingOver(weights, hello.ranks) if colocated else groups.open(weights, link, hello)

    mode = "colocated" if colocated else "direct"
    return LiveSender(LiveSending(version, mode, weights, opened, groups.keep, timeout)).serve(room.reception)


def _buffer(size: int, device: Any) -> Any:
    import torch

    return torch.empty(size, dtype=torch.uint8, device=device)
