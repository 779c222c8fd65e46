"""What publish(), commit() and prepare() return."""

from __future__ import annotations

from dataclasses import dataclass

from ..transfer.sender import Delivery
from .verdict import EngineOutcome


@dataclass(frozen=True)
class PublishResult:
    """root: digest of the weights, the same on every engine. agents: how each got them; one that was lost has caught up
    or will, before it serves. Seconds: until all agents had the weights, that an engine stood still at most, until the
    fleet served them; the first and the last since publish() was called. size in bytes, of this rank's tensors."""

    version: str
    root: str
    size: int
    transport: str
    engines: tuple[EngineOutcome, ...]
    agents: tuple[Delivery, ...]
    staged_seconds: float
    stall_seconds: float
    committed_seconds: float


@dataclass(frozen=True)
class Prepared:
    """Weights that every engine which takes part has staged and does not serve yet: commit() them. agents: as in
    PublishResult."""

    version: str
    root: str
    size: int
    staged_seconds: float
    agents: tuple[Delivery, ...] = ()
