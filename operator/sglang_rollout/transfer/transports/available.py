"""The transports of this release, the best first, and which of them a process can use. Another one is a module and a
line here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..stage_index import StageUnusable, read_index
from . import GLOO, NCCL, PEER_COPY, Transport, gloo
from .gloo import Gloo

NAMES = (PEER_COPY, NCCL, GLOO)


def sender_transports(name: str = "Auto") -> list[Transport]:
    """name: the only one wanted, or "Auto"."""
    return [one for one in _all(device=True) if name in ("Auto", one.name)]


def agent_transports(folder: Path) -> list[Transport]:
    """For the stage in `folder`: what ends in GPU memory needs a stage there."""
    try:
        device = any(region.gpu for slot in read_index(folder).slots for region in slot.regions)
    except StageUnusable:
        device = False
    return _all(device=device)


def _all(*, device: bool) -> list[Transport]:
    del device
    return [Gloo()]


def stuck() -> bool:
    """Whether something that was aborted may still write to where it was to receive."""
    return bool(gloo.stuck)


__all__: Sequence[str] = ("NAMES", "agent_transports", "sender_transports", "stuck")
