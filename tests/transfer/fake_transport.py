"""A transport within one process, for tests of sender and receiver: bytes lie in a list that both halves see."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_rollout.transfer.digests import digest
from sglang_rollout.transfer.manifest import Bucket, Tensor, bucket_of
from sglang_rollout.transfer.transports import Meeting, Target, TransportBroken, TransportUnable


@dataclass
class Wire:
    """One group's."""

    world: int
    joined: set[int] = field(default_factory=set)
    sent: list[bytes] = field(default_factory=list)
    laid_out: dict[str, bytes] = field(default_factory=dict)  # what agents pull
    took: dict[int, set[int]] = field(default_factory=dict)
    aborted: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)

    def until(self, done: Callable[[], bool], seconds: float) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: done() or self.aborted, seconds):
                raise TransportBroken("too slow")
            if not done():
                raise TransportBroken("aborted")

    def change(self, what: Callable[[], Any]) -> None:
        with self.changed:
            what()
            self.changed.notify_all()


@dataclass
class FakeTransport:
    """hurt: called with (rank, number) before each receive; may raise or wait. pulled: agents take buckets by
    themselves, two at once."""

    name: str = "Gloo"
    pulled: bool = False
    offered: dict[str, str] | None = field(default_factory=dict)
    works: bool = True
    hurt: Callable[[int, int], None] = lambda rank, number: None
    wires: dict[str, Wire] = field(default_factory=dict)
    opened: list[int] = field(default_factory=list)

    def offer(self) -> dict[str, str] | None:
        return self.offered

    def suits(self, offers: Sequence[Mapping[str, str]]) -> bool:
        return True

    def open(self, meeting: Meeting) -> FakeSender:
        self.opened.append(meeting.world)
        self.wires[meeting.group] = Wire(meeting.world)
        return FakeSender(self.name, self.wires[meeting.group], self.pulled)

    def enter(self, meeting: Meeting, rank: int, details: Mapping[str, str]) -> FakeReceiver:
        if not self.works:
            raise TransportUnable("the path was tried and does not work")
        return FakeReceiver(self, self.wires[meeting.group], rank)


class FakeSender:
    gpu = False

    def __init__(self, name: str, wire: Wire, pulled: bool) -> None:
        self.name = name
        self.pulled = pulled
        self._wire = wire
        self._loaded: dict[int, bytes] = {}

    def details(self, rank: int) -> dict[str, str]:
        return {}

    def gather(self, seconds: float) -> None:
        self._wire.until(lambda: len(self._wire.joined) == self._wire.world - 1, seconds)

    def buffer(self, number: int, size: int) -> Any:
        raise AssertionError

    def load(self, number: int, pieces: Sequence[Any]) -> dict[str, str]:
        self._loaded[number] = b"".join(bytes(piece) for piece in pieces)
        if not self.pulled:
            return {}
        self._wire.laid_out[str(number)] = self._loaded[number]
        return {"at": str(number)}

    def send(self, number: int, seconds: float) -> None:
        assert not self.pulled
        wire = self._wire
        index = len(wire.sent)
        wire.change(lambda: wire.sent.append(self._loaded[number]))
        wire.until(lambda: len(wire.took.get(index, ())) == wire.world - 1, seconds)

    def free(self, number: int) -> None:
        del self._loaded[number]
        self._wire.laid_out.pop(str(number), None)

    def abort(self) -> None:
        self._wire.change(lambda: setattr(self._wire, "aborted", True))


class FakeReceiver:
    gpu = False

    def __init__(self, transport: FakeTransport, wire: Wire, rank: int) -> None:
        self._transport, self._wire, self._rank = transport, wire, rank
        self._received = 0
        self.lanes = 2 if transport.pulled else 1

    def join(self, seconds: float) -> None:
        self._wire.change(lambda: self._wire.joined.add(self._rank))

    def receive(self, bucket: Bucket, details: Mapping[str, str], target: Target, seconds: float) -> None:
        index = self._received
        self._transport.hurt(self._rank, index)
        wire = self._wire
        assert target.host is not None
        if self._transport.pulled:
            self._received += 1
            target.host[:] = wire.laid_out[details["at"]]
            return
        wire.until(lambda: len(wire.sent) > index, seconds)
        target.host[:] = wire.sent[index]
        wire.change(lambda: wire.took.setdefault(index, set()).add(self._rank))
        self._received += 1

    def abort(self) -> None:
        self._wire.change(lambda: setattr(self._wire, "aborted", True))


@dataclass
class Bytes:
    """An outgoing bucket of plain bytes. said: the digest to announce instead of the true one."""

    bucket: Bucket
    data: bytes
    said: str = ""
    load_seconds: float = 0.0

    def pieces(self) -> Sequence[Any]:
        time.sleep(self.load_seconds)
        return [self.data]

    def write_flat(self, into: Any, algorithm: str = "") -> str:
        raise AssertionError

    def digest(self, algorithm: str, pieces: Sequence[Any]) -> str:
        return self.said or digest(algorithm, memoryview(self.data))


def one(name: str, data: bytes, dtype: str = "U8", said: str = "") -> Bytes:
    size = {"U8": 1, "F32": 4, "BF16": 2}[dtype]
    return Bytes(bucket_of([Tensor(name, dtype, (len(data) // size,))]), data, said)
