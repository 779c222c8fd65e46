"""What an agent and one sender say to each other while weights come: the agent's answers, and the buckets that it takes
meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .link import Link
from .manifest import Bucket, Manifest, ManifestRefused
from .session import (
    Announced,
    Cancel,
    End,
    Go,
    Joined,
    LinkLost,
    Message,
    Ready,
    Sealed,
    SessionError,
    Took,
    Unable,
    Welcome,
)
from .transports import ReceivingGroup, TransportBroken, TransportUnable


@dataclass
class Arriving:
    """A bucket that was announced. place: its number in the stage. came: its bytes are there and have its digest."""

    bucket: Bucket
    place: int
    details: Mapping[str, str]
    came: bool = False


class Slot(Protocol):
    """What is being filled, by one sender or several."""

    def left(self) -> float:
        """Seconds. Raises TimeoutError when there are none."""
        ...

    def group(self, welcome: Welcome, own: str) -> tuple[ReceivingGroup, bool]:
        """And whether it is one of before, joined already. Raises TransportUnable."""
        ...

    async def join(self, group: ReceivingGroup) -> None:
        """Raises TransportBroken, TransportUnable."""
        ...

    def drop_group(self, name: str) -> None: ...

    def begin(self, digest: str) -> None:
        """Once for each group; the digest is that of before. Raises SessionError."""
        ...

    def admit(self, announced: Announced) -> Arriving:
        """Raises ManifestRefused, StageUnusable."""
        ...

    def lies_on_gpu(self, arriving: Arriving, group: ReceivingGroup) -> bool:
        """It comes right to where it stays, in GPU memory."""
        ...

    async def receive(self, arriving: Arriving, group: ReceivingGroup) -> None:
        """Raises TransportBroken, and BytesRefused for one that is checked at once."""
        ...

    async def check_on_gpu(self, arriving: Arriving) -> None:
        """Raises BytesRefused."""
        ...

    def part(self, end: End, buckets: Sequence[Arriving]) -> Manifest:
        """What this sender has announced, while the last of it is still being checked. Raises BytesRefused,
        ManifestRefused."""
        ...

    def end(self, part: Manifest, buckets: Sequence[Arriving], *, last: bool) -> Sealed:
        """Raises BytesRefused, ManifestRefused."""
        ...


class Conversation:
    """With one sender."""

    def __init__(self, slot: Slot, link: Link) -> None:
        self._slot = slot
        self._link = link
        self._buckets: list[Arriving] = []
        self._group: ReceivingGroup | None = None
        self._name = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, last: bool) -> None:
        """Until the sender has sent all. last: what came is sealed then. Raises what Slot raises, SessionError."""
        try:
            while True:
                message = await self._next()
                match message:
                    case Welcome():
                        await self._welcome(message)
                    case Announced():
                        await self._announced(message)
                    case Go(number):
                        self._start(self._take(number, self._name, self._group))
                    case End():
                        part = self._slot.part(message, self._buckets)
                        await self._all_checked()
                        await self._link.send(self._slot.end(part, self._buckets, last=last))
                        return
                    case Cancel(reason, lasting):
                        raise ManifestRefused(reason) if lasting else SessionError(reason)
                    case _:
                        raise SessionError(f"the sender said {message.kind}, which has no meaning here")
        finally:
            if self._group is not None and self._tasks:
                self._slot.drop_group(self._name)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._failure.cancel()

    async def _next(self) -> Message:
        listening = asyncio.create_task(self._link.receive(self._slot.left()))
        waiting: set[asyncio.Future[Any]] = {listening, self._failure}
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                await self._failure
            return await listening
        finally:
            if not listening.done():
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)

    async def _all_checked(self) -> None:
        """A sender ends when all was taken: what still goes on here are checks."""
        while self._tasks and not self._failure.done():
            waiting: set[asyncio.Future[Any]] = {*self._tasks, self._failure}
            await asyncio.wait(waiting, timeout=self._slot.left(), return_when=asyncio.FIRST_COMPLETED)
        if self._failure.done():
            await self._failure

    async def _welcome(self, welcome: Welcome) -> None:
        if self._group is not None and welcome.group != self._name:
            self._slot.drop_group(self._name)  # what is under way in it ends soon, broken
        self._slot.begin(welcome.digest)
        self._name, self._group = welcome.group, None
        try:
            group, known = self._slot.group(welcome, self._link.own)
        except TransportUnable as error:
            await self._link.send(Unable(welcome.group, str(error)))
            return
        self._group = group
        if known:
            await self._link.send(Joined(welcome.group))
        else:
            self._start(self._join(group, welcome))

    async def _join(self, group: ReceivingGroup, welcome: Welcome) -> None:
        try:
            await self._slot.join(group)
        except (TransportBroken, TransportUnable) as error:
            self._slot.drop_group(welcome.group)
            await self._link.send(Unable(welcome.group, str(error)))
        else:
            await self._link.send(Joined(welcome.group))

    async def _announced(self, announced: Announced) -> None:
        number = announced.number
        if number < len(self._buckets):
            if self._buckets[number].bucket != announced.bucket():
                raise ManifestRefused(f"bucket {number} was announced again as another one")
            self._buckets[number].details = announced.details
        elif number == len(self._buckets):
            self._buckets.append(self._slot.admit(announced))
        else:
            raise SessionError(f"bucket {number} was announced before bucket {len(self._buckets)}")
        await self._link.send(Ready(number, self._name))

    async def _take(self, number: int, name: str, group: ReceivingGroup | None) -> None:
        if group is None or not number < len(self._buckets):
            raise SessionError(f"the sender sends bucket {number} before it is awaited")
        arriving = self._buckets[number]
        try:
            await self._slot.receive(arriving, group)
        except TransportBroken as error:
            if name == self._name:
                await self._link.send(Unable(name, str(error)))
            return
        await self._link.send(Took(number, name))
        if self._slot.lies_on_gpu(arriving, group):
            await self._slot.check_on_gpu(arriving)

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or self._failure.done() or (error := task.exception()) is None:
            return
        if not isinstance(error, LinkLost):  # whoever listens is told
            self._failure.set_exception(error)
