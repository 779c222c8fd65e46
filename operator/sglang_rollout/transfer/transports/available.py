"""The transports of this release, the best first, and which of them a process can use. Another one is a module and a
line here."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from ..stage_index import StageUnusable, read_index
from . import Transport, gloo, nccl, peer_copy
from .gloo import Gloo
from .nccl import Nccl
from .peer_copy import PeerCopy


def sender_transports(name: str = "Auto") -> list[Transport]:
    """name: the only one wanted, or "Auto". Call it in the trainer's own thread: what sends from a GPU takes the one
    that is torch's current one there. The first needs no kernel on the engines' GPUs."""
    device = _current_gpu()
    found: list[Transport] = [] if device is None else [PeerCopy(device), Nccl(device)]
    return [one for one in (*found, Gloo()) if name in ("Auto", one.name)]


def agent_transports(folder: Path) -> list[Transport]:
    """For the stage in `folder`: what ends in GPU memory needs a stage there."""
    try:
        gpus = {region.gpu for slot in read_index(folder).slots for region in slot.regions if region.gpu}
    except StageUnusable:
        gpus = set()
    if not gpus or _current_gpu() is None:
        return [Gloo()]
    device = home_of(gpus)
    return [PeerCopy(device), Nccl(device), Gloo()]


def stuck() -> bool:
    """Whether something that was aborted may still write to where it was to receive."""
    return bool(gloo.stuck or nccl.stuck or peer_copy.stuck())


def _current_gpu() -> int | None:
    try:
        import torch
    except ImportError:
        return None
    return torch.cuda.current_device() if torch.cuda.is_available() else None


def home_of(gpus: Collection[str]) -> int:
    """The ordinal of the GPU that receives for a stage on these (UUIDs): the first of them that this process sees, 0
    when it sees none. What lies on others is mapped for it as well, so that one rank of a collective fills all."""
    import torch

    return next((n for n in range(torch.cuda.device_count()) if nccl.gpu_uuid(n) in gpus), 0)
