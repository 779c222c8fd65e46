"""The agent's side of a sending: takes bucket after bucket into a slot of the stage, each checked against the running
model before its bytes come and against its digest after, while the next one comes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from .conversation import Arriving, Conversation
from .digests import ALGORITHMS
from .expected import Expected
from .gpu_arrivals import GpuArrivals
from .link import Link, connect, host_port
from .manifest import Manifest, ManifestRefused, Tensor
from .session import (
    Announced,
    End,
    Hello,
    LinkLost,
    Message,
    Refused,
    Sealed,
    SessionError,
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
        self._broken: list[ReceivingGroup] = []
        self._wires: dict[int, ThreadPoolExecutor] = {}  # by the number of their threads
        self._checks = ThreadPoolExecutor(1, "weights-check")
        self._on_gpu = GpuArrivals(self._checks, self._check_on_gpu)
        self._group_name = ""
        self.manifest: Manifest | None = None
        self.nonfinite = 0

    async def close(self) -> None:
        """Nothing writes to the slot after it, unless what was aborted is stuck (transports.stuck)."""
        if self.manifest is None and self._group_name:
            self._cache.drop(self._group_name)
        for pool in (*self._wires.values(), self._checks):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await asyncio.to_thread(pool.shutdown)

    async def take_from(self, address: str, *, last: bool) -> None:
        host, port = host_port(address)
        hello = await asyncio.to_thread(self._hello)  # it may import torch, while nobody would beat
        link = await connect(host, port, min(CONNECT_SECONDS, self.left()))
        try:
            await link.send(hello)
            await Conversation(self, link).run(last)
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

    def left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    # --- what the conversation asks for ---

    def group(self, welcome: Welcome, own: str) -> tuple[ReceivingGroup, bool]:
        self._group_name = welcome.group
        if (kept := self._cache.get(welcome.group)) is not None:
            return kept, True
        if welcome.transport not in self._transports:
            raise TransportUnable(f"{welcome.transport} was not offered")
        meeting = Meeting(welcome.group, own, welcome.world, min(JOIN_SECONDS, self.left()))
        group = self._transports[welcome.transport].enter(meeting, welcome.rank, welcome.details)
        self._cache.keep(welcome.group, group)
        return group, False

    async def join(self, group: ReceivingGroup) -> None:
        await asyncio.to_thread(group.join, min(JOIN_SECONDS, self.left()))

    def drop_group(self, name: str) -> None:
        self._cache.drop(name)

    def begin(self, digest: str) -> None:
        if digest not in ALGORITHMS or self._digest not in ("", digest):
            raise SessionError(f"the sender chose digest {digest!r}, which was not offered")
        if self._writer is None:
            self._digest = digest
            order = self._order
            self._writer = self._stage.write(order.slot, digest, allow_nonfinite=order.allow_nonfinite)

    def admit(self, announced: Announced) -> Arriving:
        assert self._writer is not None
        bucket = announced.bucket()
        if not bucket.digest:
            raise ManifestRefused(f"bucket {announced.number} was announced without a digest")
        self._expected.admit(bucket)
        return Arriving(bucket, self._writer.place(bucket), announced.details)

    def lies_on_gpu(self, arriving: Arriving, group: ReceivingGroup) -> bool:
        assert self._writer is not None
        return group.gpu and self._writer.address(arriving.place) is not None

    async def receive(self, arriving: Arriving, group: ReceivingGroup) -> None:
        assert self._writer is not None
        wire = self._wire(group.lanes)
        if self.lies_on_gpu(arriving, group):
            address = self._writer.address(arriving.place) or 0
            await _in(wire, self._come, arriving, group, _Place(address=address))
        else:
            await self._through_the_host(wire, arriving, group)
            self._came(arriving)

    def _come(self, arriving: Arriving, group: ReceivingGroup, target: _Place) -> None:
        """What follows in a group that broke would be taken for what is missing."""
        if any(group is broken for broken in self._broken):
            raise TransportBroken("a bucket before it has not come")
        try:
            group.receive(arriving.bucket, arriving.details, target, self.left())
        except TransportBroken:
            self._broken.append(group)
            raise

    def _wire(self, lanes: int) -> ThreadPoolExecutor:
        if lanes not in self._wires:
            self._wires[lanes] = ThreadPoolExecutor(lanes, "weights-receive")
        return self._wires[lanes]

    async def _through_the_host(self, wire: ThreadPoolExecutor, arriving: Arriving, group: ReceivingGroup) -> None:
        """Checked before it is told to be here: what comes into a buffer first takes memory until it has been."""
        assert self._writer is not None
        window = self._writer.fill(arriving.place)

        def come() -> None:
            target = _Place(host=window.__enter__())
            try:
                self._come(arriving, group, target)
            except BaseException as error:
                with contextlib.suppress(BaseException):
                    window.__exit__(type(error), error, error.__traceback__)
                raise

        await _in(wire, come)
        await _in(self._checks, window.__exit__, None, None, None)

    async def check_on_gpu(self, arriving: Arriving) -> None:
        await self._on_gpu.check(arriving.place)
        self._came(arriving)

    def _check_on_gpu(self, places: Sequence[int]) -> None:
        from .device_checks import check_addresses

        assert self._writer is not None
        self._writer.check_on_gpu(places, check_addresses)

    def _came(self, arriving: Arriving) -> None:
        if not arriving.came:
            arriving.came = True
            self._done += arriving.bucket.size
            self._order.progress(self._done)

    def part(self, end: End, buckets: Sequence[Arriving]) -> Manifest:
        part = Manifest(tuple(one.bucket for one in buckets), self._digest)
        if part.root != end.root:
            raise BytesRefused(
                f"the sender ended with weights of digest {end.root[:12]}, announced were those of {part.root[:12]}"
            )
        self._aliases |= end.aliases
        part.work_out()
        return part

    def end(self, part: Manifest, buckets: Sequence[Arriving], *, last: bool) -> Sealed:
        assert self._writer is not None
        missing = next((number for number, one in enumerate(buckets) if not one.came), None)
        if missing is not None:
            raise BytesRefused(f"the sender ended, and bucket {missing} never came")
        if not last:
            return Sealed(part.root)
        self._expected.complete()
        manifest = self._writer.seal(self._order.version, aliases=self._aliases, likely=part)
        self.nonfinite = sum(self._writer.nonfinite.values())
        self.manifest = manifest
        return Sealed(manifest.root, self.nonfinite)


@dataclass(frozen=True)
class _Place:
    host: memoryview | None = None
    address: int = 0


async def _in(pool: ThreadPoolExecutor, call: Callable[..., Any], *arguments: Any) -> None:
    await asyncio.get_running_loop().run_in_executor(pool, call, *arguments)


async def _tell(link: Link, message: Message) -> None:
    with contextlib.suppress(LinkLost):
        await link.send(message)
