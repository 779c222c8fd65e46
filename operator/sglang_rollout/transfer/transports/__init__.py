"""How the bytes of a bucket get from a trainer's sender to agents. Each transport has two halves, the sender's and the
agent's; both block, in a thread of their own, and end within the seconds given or soon after abort()."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..manifest import Bucket

GLOO = "Gloo"
NCCL = "NCCL"
PEER_COPY = "PeerCopy"

PIECE = 4 << 20
"""Tensors from this size on, in bytes, are sent from where they lie; smaller neighbours are packed together."""


class TransportBroken(Exception):
    """The group is of no use any more: a peer is gone or too slow, or it was aborted. The sentence says which."""


class TransportUnable(Exception):
    """This transport does not work between these two; another may."""


class Target(Protocol):
    """Where the agent wants a bucket: host memory, or an address in GPU memory."""

    @property
    def host(self) -> memoryview | None: ...
    @property
    def address(self) -> int: ...


@dataclass(frozen=True)
class Meeting:
    """Where the sender meets its agents. host: the address of this side that the other reaches. world: agents and the
    sender."""

    group: str
    host: str
    world: int
    seconds: float


class SendingGroup(Protocol):
    """The sender's half of one group. gpu: buckets are written into buffer(), in GPU memory, rather than taken in
    pieces from where they lie. pulled: each agent takes a bucket by itself, so that none waits for another."""

    @property
    def name(self) -> str:
        """Of its transport."""
        ...

    @property
    def gpu(self) -> bool: ...
    @property
    def pulled(self) -> bool: ...

    def details(self, rank: int) -> dict[str, str]:
        """What the agent of this rank needs for joining."""
        ...

    def gather(self, seconds: float) -> None:
        """Returns when every agent has joined. Raises TransportBroken."""
        ...

    def buffer(self, number: int, size: int) -> Any:
        """Of a `gpu` group: torch bytes for the whole bucket, kept until free(). Raises TransportBroken."""
        ...

    def load(self, number: int, pieces: Sequence[Any]) -> dict[str, str]:
        """Takes the bucket's bytes and keeps them until free(): torch tensors of bytes, in the order of pieces_of(), or
        the one buffer. Returns what agents need besides."""
        ...

    def send(self, number: int, seconds: float) -> None:
        """Returns when nothing of the bucket must be kept for the agents that live. Raises TransportBroken."""
        ...

    def free(self, number: int) -> None: ...
    def abort(self) -> None:
        """From any thread. Never blocks."""
        ...


class ReceivingGroup(Protocol):
    """The agent's half. gpu: it receives to an address in GPU memory. lanes: so many buckets may come at once; with
    one, they come in the order of the calls."""

    @property
    def gpu(self) -> bool: ...
    @property
    def lanes(self) -> int: ...

    def join(self, seconds: float) -> None:
        """Raises TransportBroken, TransportUnable."""
        ...

    def receive(self, bucket: Bucket, details: Mapping[str, str], target: Target, seconds: float) -> None:
        """The bytes are in the target when it returns. Raises TransportBroken."""
        ...

    def abort(self) -> None:
        """From any thread. Never blocks."""
        ...


class Transport(Protocol):
    """What a process can do."""

    name: str

    def offer(self) -> dict[str, str] | None:
        """What a sender must know of this process; None: it cannot."""
        ...

    def suits(self, offers: Sequence[Mapping[str, str]]) -> bool:
        """The sender's side: whether these agents can be reached this way."""
        ...

    def open(self, meeting: Meeting) -> SendingGroup:
        """Raises TransportUnable."""
        ...

    def enter(self, meeting: Meeting, rank: int, details: Mapping[str, str]) -> ReceivingGroup: ...


def pieces_of(bucket: Bucket) -> list[tuple[int, int]]:
    """Offset and size in bytes of what is sent in one go. Both sides compute it alike."""
    pieces: list[tuple[int, int]] = []
    begin = end = 0
    for tensor, offset in bucket.placed():
        if tensor.size >= PIECE:
            if end > begin:
                pieces.append((begin, end - begin))
            pieces.append((offset, tensor.size))
            begin = end = offset + tensor.size
        else:
            end = offset + tensor.size
    if end > begin:
        pieces.append((begin, end - begin))
    return pieces
