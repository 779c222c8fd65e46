"""The agent's side of a sending: takes bucket after bucket into a slot of the stage, each checked against the running
model before its bytes come and against its digest after, while the next one comes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from .digests import ALGORITHMS
from .expected import Expected
from .host_checks import Checked
from .link import Link, connect, host_port
from .manifest import Bucket, Manifest, ManifestRefused, Tensor
from .session import (
    Announced,
    Cancel,
    End,
    Go,
    Hello,
    Joined,
    LinkLost,
    Message,
    Ready,
    Refused,
    Sealed,
    SessionError,
    Took,
    Unable,
    Welcome,
)
from .stage import BytesRefused, Stage, StageWriter
from .stage_index import StageUnusable
from .transports import Meeting, ReceivingGroup, Transport, TransportBroken, TransportUnable

CONNECT_SECONDS = 10.0
JOIN_SECONDS = 20.0
CLOSE_SECONDS = 1.0
GROUPS_KEPT = 4
AUTO = "Auto"


class WeightsRefused(Exception):
    """What was sent is wrong: trying the same again cannot help."""


class ReceivingFailed(Exception):
    """The peer was lost, gave up, or was too slow."""


@dataclass(frozen=True)
class Receiving:
    """What to receive and where to. senders: host:port in their order. transport: the one to use, or "Auto".
    timeout in seconds; progress gets bytes staged, from the event loop."""

    transaction: str
    version: str
    senders: tuple[str, ...]
    receiver: str
    slot: str
    transport: str = AUTO
    members: int = 1
    epoch: int = 0
    ranks: int = 1
    algorithm: str = ""
    reference: Mapping[str, Tensor] | None = None
    tied_names: frozenset[str] = frozenset()
    allow_nonfinite: bool = False
    timeout: float = 300.0
    progress: Callable[[int], None] = field(default=lambda done: None)


class GroupCache:
    """Groups that live over transactions, until the sender makes others."""

    def __init__(self) -> None:
        self._groups: dict[str, ReceivingGroup] = {}

    @property
    def names(self) -> list[str]:
        return list(self._groups)

    def get(self, name: str) -> ReceivingGroup | None:
        return self._groups.get(name)

    def keep(self, name: str, group: ReceivingGroup) -> None:
        self._groups[name] = group
        while len(self._groups) > GROUPS_KEPT:
            self._groups.pop(next(iter(self._groups))).abort()

    def drop(self, name: str) -> None:
        if (group := self._groups.pop(name, None)) is not None:
            group.abort()


async def receive(
    stage: Stage, transports: Sequence[Transport], cache: GroupCache, order: Receiving
) -> tuple[Manifest, int]:
    """The manifest of what the slot now holds, and how many values are not finite. Raises WeightsRefused and
    ReceivingFailed; after either, and when cancelled, the slot holds nothing."""
    intake = _Intake(stage, transports, cache, order)
    try:
        for index, address in enumerate(order.senders):
            await intake.take_from(address, last=index == len(order.senders) - 1)
        assert intake.manifest is not None
        return intake.manifest, intake.nonfinite
    except (ManifestRefused, BytesRefused) as error:
        raise WeightsRefused(str(error)) from error
    except TimeoutError as error:
        raise ReceivingFailed(f"the weights were not here within {order.timeout:.0f} s") from error
    except (SessionError, StageUnusable, TransportBroken, OSError) as error:
        raise ReceivingFailed(str(error)) from error
    finally:
        await intake.close()


@dataclass
class _Arriving:
    bucket: Bucket
    place: int
    details: Mapping[str, str]
    came: bool = False


class _Intake:
    def __init__(self, stage: Stage, transports: Sequence[Transport], cache: GroupCache, order: Receiving) -> None:
        self._stage = stage
        self._transports = {t.name: t for t in transports if order.transport in (AUTO, t.name)}
        self._cache = cache
        self._order = order
        self._deadline = time.monotonic() + order.timeout
        self._expected = Expected(order.reference, order.tied_names)
        self._writer: StageWriter | None = None
        self._digest = ""
        self._aliases: dict[str, str] = {}
        self._done = 0
        self._wire = ThreadPoolExecutor(1, "weights-receive")
        self._checks = ThreadPoolExecutor(1, "weights-check")
        self._group_name = ""
        self.manifest: Manifest | None = None
        self.nonfinite = 0

    async def close(self) -> None:
        """Nothing writes to the slot after it, unless what was aborted is stuck (transports.stuck)."""
        if self.manifest is None and self._group_name:
            self._cache.drop(self._group_name)
        for pool in (self._wire, self._checks):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await asyncio.to_thread(pool.shutdown)

    async def take_from(self, address: str, *, last: bool) -> None:
        host, port = host_port(address)
        hello = await asyncio.to_thread(self._hello)  # it may import torch, while nobody would beat
        link = await connect(host, port, min(CONNECT_SECONDS, self._left()))
        try:
            await link.send(hello)
            await _Conversation(self, link).run(last)
        except (ManifestRefused, BytesRefused) as error:
            await _tell(link, Refused(str(error), lasting=True))
            raise
        except (StageUnusable, SessionError, TimeoutError) as error:
            await _tell(link, Refused(str(error) or "out of time"))
            raise
        finally:
            await link.close()

    def _hello(self) -> Hello:
        offers = {name: offer for name, t in self._transports.items() if (offer := t.offer()) is not None}
        order = self._order
        if not offers:
            raise SessionError(f"transport {order.transport} cannot be used by this agent: choose another, or Auto")
        preferred = [order.algorithm] if order.algorithm in ALGORITHMS else []
        digests = [self._digest] if self._digest else [*preferred, *(a for a in ALGORITHMS if a not in preferred)]
        return Hello(
            order.transaction, order.version, order.receiver, order.members, order.epoch, order.ranks, "staged",
            offers, digests, self._cache.names,
        )  # fmt: skip

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    # --- what the conversation asks for ---

    def group(self, welcome: Welcome, own: str) -> tuple[ReceivingGroup, bool]:
        """And whether it is one of before, joined already. Raises TransportUnable."""
        self._group_name = welcome.group
        if (kept := self._cache.get(welcome.group)) is not None:
            return kept, True
        if welcome.transport not in self._transports:
            raise TransportUnable(f"{welcome.transport} was not offered")
        meeting = Meeting(welcome.group, own, welcome.world, min(JOIN_SECONDS, self._left()))
        group = self._transports[welcome.transport].enter(meeting, welcome.rank, welcome.details)
        self._cache.keep(welcome.group, group)
        return group, False

    def drop_group(self, name: str) -> None:
        self._cache.drop(name)

    def writer(self, digest: str) -> StageWriter:
        if digest not in ALGORITHMS or self._digest not in ("", digest):
            raise SessionError(f"the sender chose digest {digest!r}, which was not offered")
        if self._writer is None:
            self._digest = digest
            order = self._order
            self._writer = self._stage.write(order.slot, digest, allow_nonfinite=order.allow_nonfinite)
        return self._writer

    def admit(self, announced: Announced) -> _Arriving:
        """Raises ManifestRefused, StageUnusable."""
        assert self._writer is not None
        bucket = announced.bucket()
        if not bucket.digest:
            raise ManifestRefused(f"bucket {announced.number} was announced without a digest")
        self._expected.admit(bucket)
        return _Arriving(bucket, self._writer.place(bucket), announced.details)

    async def fill(self, arriving: _Arriving, group: ReceivingGroup) -> None:
        """Raises TransportBroken, BytesRefused."""
        assert self._writer is not None
        loop = asyncio.get_running_loop()
        on_gpu = group.gpu and self._writer.address(arriving.place) is not None
        slot: AbstractContextManager[Any] = (
            self._writer.fill_on_gpu(arriving.place, _check_on_gpu) if on_gpu else self._writer.fill(arriving.place)
        )

        def come() -> None:
            place = slot.__enter__()
            target = _Place(address=place) if on_gpu else _Place(host=place)
            try:
                group.receive(arriving.bucket, arriving.details, target, self._left())
            except BaseException as error:
                with contextlib.suppress(BaseException):
                    slot.__exit__(type(error), error, error.__traceback__)
                raise

        await loop.run_in_executor(self._wire, come)
        await loop.run_in_executor(self._checks, slot.__exit__, None, None, None)
        if not arriving.came:
            arriving.came = True
            self._done += arriving.bucket.size
            self._order.progress(self._done)

    def end(self, end: End, buckets: Sequence[_Arriving], *, last: bool) -> Sealed:
        assert self._writer is not None
        part = Manifest(tuple(one.bucket for one in buckets), self._digest)
        missing = next((number for number, one in enumerate(buckets) if not one.came), None)
        if missing is not None or part.root != end.root:
            raise BytesRefused(
                f"the sender ended with weights of digest {end.root[:12]}, here came those of {part.root[:12]}"
                + (f" and bucket {missing} never did" if missing is not None else "")
            )
        self._aliases |= end.aliases
        if not last:
            return Sealed(part.root)
        self._expected.complete()
        manifest = self._writer.seal(self._order.version, aliases=self._aliases)
        self.nonfinite = sum(self._writer.nonfinite.values())
        self.manifest = manifest
        return Sealed(manifest.root, self.nonfinite)

    def left(self) -> float:
        return self._left()


@dataclass(frozen=True)
class _Place:
    host: memoryview | None = None
    address: int = 0


def _check_on_gpu(address: int, bucket: Bucket, algorithm: str) -> Checked:
    from .device_checks import check_flat, flat_at

    return check_flat(flat_at(address, bucket.size), bucket, algorithm)


class _Conversation:
    """With one sender."""

    def __init__(self, intake: _Intake, link: Link) -> None:
        self._intake = intake
        self._link = link
        self._buckets: list[_Arriving] = []
        self._group: ReceivingGroup | None = None
        self._name = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, last: bool) -> None:
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
                        await self._link.send(self._intake.end(message, self._buckets, last=last))
                        return
                    case Cancel(reason, lasting):
                        raise ManifestRefused(reason) if lasting else SessionError(reason)
                    case _:
                        raise SessionError(f"the sender said {message.kind}, which has no meaning here")
        finally:
            if self._group is not None and self._tasks:
                self._intake.drop_group(self._name)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._failure.cancel()

    async def _next(self) -> Message:
        listening = asyncio.create_task(self._link.receive(self._intake.left()))
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

    async def _welcome(self, welcome: Welcome) -> None:
        if self._group is not None and welcome.group != self._name:
            self._intake.drop_group(self._name)  # what is under way in it ends soon, broken
        self._intake.writer(welcome.digest)
        self._name, self._group = welcome.group, None
        try:
            group, known = self._intake.group(welcome, self._link.own)
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
            await asyncio.to_thread(group.join, min(JOIN_SECONDS, self._intake.left()))
        except (TransportBroken, TransportUnable) as error:
            self._intake.drop_group(welcome.group)
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
            self._buckets.append(self._intake.admit(announced))
        else:
            raise SessionError(f"bucket {number} was announced before bucket {len(self._buckets)}")
        await self._link.send(Ready(number, self._name))

    async def _take(self, number: int, name: str, group: ReceivingGroup | None) -> None:
        if group is None or not number < len(self._buckets):
            raise SessionError(f"the sender sends bucket {number} before it is awaited")
        try:
            await self._intake.fill(self._buckets[number], group)
        except TransportBroken as error:
            if name == self._name:
                await self._link.send(Unable(name, str(error)))
        else:
            await self._link.send(Took(number, name))

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


async def _tell(link: Link, message: Message) -> None:
    with contextlib.suppress(LinkLost):
        await link.send(message)
