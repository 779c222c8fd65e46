"""Broadcast over TCP by Gloo, in a process group of its own: host memory to host memory, works everywhere.

Gloo has no way to break off a collective: an aborted one is left to its own deadline, with all that it may still touch
kept alive meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from ..manifest import Bucket
from . import GLOO, Meeting, Target, TransportBroken, TransportUnable, pieces_of

LOOK_SECONDS = 0.1  # between looks at whether it was aborted
LANES = 2  # connections to each peer: one copies while the other waits for room
CUT = 8 << 20  # bytes that one connection gets in one go


class Gloo:
    name = GLOO

    def offer(self) -> dict[str, str] | None:
        try:
            import torch.distributed as distributed
        except ImportError:
            return None
        return {} if distributed.is_available() and distributed.is_gloo_available() else None

    def suits(self, offers: Sequence[Mapping[str, str]]) -> bool:
        return self.offer() is not None

    def open(self, meeting: Meeting) -> GlooSender:
        return GlooSender(meeting)

    def enter(self, meeting: Meeting, rank: int, details: Mapping[str, str]) -> GlooReceiver:
        return GlooReceiver(meeting, rank, details)


class GlooGroup:
    """A process group that belongs to us alone, never torch's default one."""

    def __init__(
        self, store: Any, meeting: Meeting, rank: int, seconds: float, *, lanes: int = 1, cut: int = 0
    ) -> None:
        """lanes: connections to each peer; cut: bytes that one of them gets in one go, 0: whole tensors. Equal on all
        sides, and the defaults where another side is plain torch. Raises RuntimeError."""
        from torch.distributed import PrefixStore, ProcessGroupGloo

        options = ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=seconds)
        # The address that the other side reaches us at: Gloo would take what our host name resolves to.
        # Gloo spreads collectives over its devices in turn.
        options._devices = [ProcessGroupGloo.create_device(hostname=meeting.host) for _ in range(lanes)]
        options._threads = 2 * lanes
        self._group: Any = ProcessGroupGloo(PrefixStore(meeting.group, store), rank, meeting.world, options)
        self._aborted = threading.Event()
        self._cut = cut

    def broadcast(self, tensors: Sequence[Any], seconds: float) -> None:
        """Raises TransportBroken."""
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=seconds)
        end = time.monotonic() + seconds
        works = []
        try:
            for tensor in tensors:
                for part in tensor.split(self._cut) if self._cut else [tensor]:
                    works.append(self._group.broadcast([part], options))
            for work in works:
                self._wait(work, end)
        except RuntimeError as error:
            raise TransportBroken(str(error).splitlines()[0][:200]) from error
        except TransportBroken:
            _outlive(self._group, works, tensors)
            raise

    def _wait(self, work: Any, end: float) -> None:
        while True:
            if self._aborted.is_set():
                raise TransportBroken("the transfer was broken off")
            try:
                work.wait(timedelta(seconds=LOOK_SECONDS))
                return
            except RuntimeError:
                if work.is_completed():
                    raise
                if time.monotonic() > end:
                    raise TransportBroken("the broadcast did not end in time") from None

    def abort(self) -> None:
        self._aborted.set()


stuck: set[int] = set()
"""Aborted collectives that have not ended: they may still write where they were to receive."""


def _outlive(group: Any, works: Sequence[Any], tensors: Sequence[Any]) -> None:
    """Freeing a group waits for its collectives while it holds the interpreter: it is done when they have ended."""

    def keep() -> None:
        held = (group, works, tensors)
        stuck.add(id(held))
        while not all(work.is_completed() for work in works):
            time.sleep(LOOK_SECONDS)
        stuck.discard(id(held))
        del held

    threading.Thread(target=keep, name="gloo-outlive", daemon=True).start()


class GlooSender:
    name = GLOO
    gpu = False
    pulled = False

    def __init__(self, meeting: Meeting) -> None:
        """Raises TransportUnable."""
        from torch.distributed import TCPStore

        try:
            self._store: Any = TCPStore(
                meeting.host, 0, None, True, timedelta(seconds=meeting.seconds), wait_for_workers=False
            )
        except RuntimeError as error:
            raise TransportUnable(f"no rendezvous at {meeting.host}: {str(error).splitlines()[0][:200]}") from error
        self._meeting = meeting
        self._group: GlooGroup | None = None
        self._loaded: dict[int, Sequence[Any]] = {}

    def details(self, rank: int) -> dict[str, str]:
        return {
            "address": self._meeting.host,
            "port": str(self._store.port),
            "lanes": str(LANES),
            "cut": str(CUT),
        }

    def gather(self, seconds: float) -> None:
        try:
            self._group = GlooGroup(self._store, self._meeting, 0, seconds, lanes=LANES, cut=CUT)
        except RuntimeError as error:
            raise TransportBroken(str(error).splitlines()[0][:200]) from error

    def buffer(self, number: int, size: int) -> Any:
        raise AssertionError("Gloo takes pieces")

    def load(self, number: int, pieces: Sequence[Any]) -> dict[str, str]:
        self._loaded[number] = pieces
        return {}

    def send(self, number: int, seconds: float) -> None:
        assert self._group is not None
        self._group.broadcast(self._loaded[number], seconds)

    def free(self, number: int) -> None:
        self._loaded.pop(number, None)

    def abort(self) -> None:
        self._loaded.clear()
        if self._group is not None:
            self._group.abort()


class GlooReceiver:
    gpu = False
    lanes = 1

    def __init__(self, meeting: Meeting, rank: int, details: Mapping[str, str]) -> None:
        self._meeting, self._rank, self._details = meeting, rank, details
        self._group: GlooGroup | None = None
        self._aborted = False

    def join(self, seconds: float) -> None:
        from torch.distributed import TCPStore

        try:
            limit = timedelta(seconds=seconds)
            store = TCPStore(self._details["address"], int(self._details["port"]), None, False, limit)
            lanes, cut = int(self._details["lanes"]), int(self._details["cut"])
            self._group = GlooGroup(store, self._meeting, self._rank, seconds, lanes=lanes, cut=cut)
        except (RuntimeError, KeyError, ValueError) as error:
            raise TransportBroken(str(error).splitlines()[0][:200]) from error
        if self._aborted:
            self._group.abort()

    def receive(self, bucket: Bucket, details: Mapping[str, str], target: Target, seconds: float) -> None:
        import torch

        assert self._group is not None
        assert target.host is not None
        if not bucket.size:
            return
        whole = torch.frombuffer(target.host, dtype=torch.uint8)
        self._group.broadcast([whole[begin : begin + size] for begin, size in pieces_of(bucket)], seconds)

    def abort(self) -> None:
        self._aborted = True
        if self._group is not None:
            self._group.abort()
