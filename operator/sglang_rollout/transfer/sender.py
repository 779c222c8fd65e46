"""Sends one version to the agents that ask for it: joins them into a group, sends bucket after bucket while the next is
being loaded, and goes on without those that are lost. What was sent is kept until all have it, so that a new group can
be sent it again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from .audience import Audience, GroupBroken, Member, MemberGone, WrongWeights
from .digests import ALGORITHMS, BLAKE2B, BLOCK_SUMS, XXH3
from .groups import GroupKeeper, NoTransport
from .manifest import Bucket, Manifest, ManifestRefused
from .reception import Arrivals, Reception, refuse
from .send_times import SendTimes
from .session import Announced, End, Go, SessionError
from .transports import SendingGroup, TransportBroken

JOIN_SECONDS = 20.0
AHEAD = 4  # buckets that are kept at once: one is awaited to have come, one travels, one is announced, one is loaded
QUEUED = 2  # of which so many are given to the wire, so that it need not wait for words
SLOWEST = 20e6  # bytes a second; a bucket that travels slower is given up
PATIENCE = 15.0  # seconds on top of that
REGROUPS = 8
_ON_HOST = (XXH3, BLOCK_SUMS, BLAKE2B)  # the fastest first
_ON_GPU = (BLOCK_SUMS,)
STUCK_SECONDS = 5.0  # after which the thread of an aborted transfer is left to itself

log = logging.getLogger(__name__)


class Outgoing(Protocol):
    """A bucket of the trainer's. All its methods block."""

    bucket: Bucket

    def pieces(self) -> Sequence[Any]:
        """torch tensors of bytes in host memory, as transports.pieces_of() cuts them."""
        ...

    def write_flat(self, into: Any, algorithm: str = "") -> str:
        """Everything in one piece. Its digest, or "" without an algorithm."""
        ...

    def digest(self, algorithm: str, pieces: Sequence[Any]) -> str: ...


@dataclass(frozen=True)
class Sending:
    """What is sent. members: overrides how many agents are waited for. aliases as in a Manifest."""

    version: str
    timeout: float = 300.0
    join_seconds: float = JOIN_SECONDS
    aliases: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Delivery:
    """How it went with one agent; reason is empty when it holds the weights. seconds: since the first agent came."""

    receiver: str
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class SendReport:
    """root: of what the agents hold now. size in bytes, of this sender's buckets."""

    transaction: str
    root: str
    size: int
    seconds: float
    transport: str
    nonfinite: int
    deliveries: tuple[Delivery, ...]


class SendFailed(Exception):
    """No agent holds the weights. lasting: sending the same again cannot help."""

    def __init__(self, sentence: str, *, lasting: bool = False, deliveries: Sequence[Delivery] = ()) -> None:
        super().__init__(sentence)
        self.lasting = lasting
        self.deliveries = tuple(deliveries)


async def send(
    reception: Reception, groups: GroupKeeper, sending: Sending, outgoing: AsyncIterator[Outgoing]
) -> SendReport:
    """Returns when every agent that is left has sealed what it got. Raises SendFailed; what `outgoing` raises is passed
    on when the agents have been told."""
    with reception.expecting(sending.version, "staged") as arrivals:
        cast = _Cast(groups, sending, arrivals)
        reason, lasting = "the trainer's sender has ended", False
        try:
            return await cast.run(outgoing)
        except (WrongWeights, ManifestRefused) as error:
            reason, lasting = str(error), True
            raise SendFailed(reason, lasting=True, deliveries=cast.deliveries()) from error
        except (SessionError, NoTransport) as error:
            reason = str(error)
            raise SendFailed(reason, deliveries=cast.deliveries()) from error
        except Exception as error:
            reason = f"the trainer failed while sending: {type(error).__name__}: {error}"
            raise
        finally:
            await cast.close(reason, lasting)
            await arrivals.turn_away()


@dataclass
class _Kept:
    """A bucket that not all agents have yet."""

    number: int
    outgoing: Outgoing
    bucket: Bucket
    loaded_for: str = ""  # the group that has it loaded
    details: dict[str, str] = field(default_factory=dict)
    announced: bool = False
    sent: bool = False


class _Cast:
    def __init__(self, groups: GroupKeeper, sending: Sending, arrivals: Arrivals) -> None:
        self._groups = groups
        self._sending = sending
        self._arrivals = arrivals
        self._audience = Audience(time.monotonic() + sending.timeout)
        self._loader = ThreadPoolExecutor(1, "weights-load")
        self._wire = ThreadPoolExecutor(1, "weights-send")
        self._late: asyncio.Task[None] | None = None
        self._transfers: deque[asyncio.Future[None]] = deque()
        self._group: SendingGroup | None = None
        self._broken: SendingGroup | None = None
        self._kept: dict[int, _Kept] = {}
        self._sent: list[Bucket] = []
        self._regroups = 0
        self._times = SendTimes(time.monotonic)
        self.digest = ""

    async def run(self, outgoing: AsyncIterator[Outgoing]) -> SendReport:
        await self._gather_members()
        self._late = asyncio.create_task(self._refuse_late())
        await self._through(self._nothing)
        self._times.mark("joined")
        async for one in outgoing:
            number = len(self._sent)
            self._sent.append(one.bucket)
            self._kept[number] = _Kept(number, one, one.bucket)
            await self._through(lambda number=number: self._forward(number))
        if not self._sent:
            raise ManifestRefused("there are no tensors: send all tensors of the model")
        manifest = Manifest(tuple(self._sent), self.digest)
        end = End(manifest.root, self._sending.aliases)  # worked out while the last buckets travel
        await self._through(self._all_taken)
        self._times.mark("all taken")
        await self._audience.tell(self._audience.living, lambda _: end)
        await self._through(self._all_sealed)
        self._times.mark("sealed")
        return self._report(manifest)

    # --- who takes part ---

    async def _gather_members(self) -> None:
        """All that will come, or those that came in time. A later transaction takes the place of one that was given
        up."""
        audience = self._audience
        other: list[tuple[Any, Any]] = []
        first = 0.0
        while True:
            living = audience.living
            if not living and other:
                link, hello = other.pop()
                audience.add(link, hello)
                first = time.monotonic()
                continue
            if living and len(living) >= max(member.hello.members for member in living):
                break
            left = audience.remaining(first + self._sending.join_seconds - time.monotonic() if living else 1e9)
            if left <= 0:
                break
            try:
                async with asyncio.timeout(min(left, 0.5)):
                    link, hello = await self._arrivals.next()
            except TimeoutError:
                with contextlib.suppress(MemberGone):
                    audience.look()
                continue
            if living and hello.transaction != living[0].hello.transaction:
                other.append((link, hello))
                continue
            if (before := audience.members.get(hello.receiver)) is not None and not before.gone:
                audience.lose(before, "the same agent came again")
                await refuse(before.link, before.gone)
            first = first if living else time.monotonic()
            audience.add(link, hello)
        for link, _ in other:
            await refuse(link, "another transaction of this version is being sent")
        self._times = SendTimes(time.monotonic)

    async def _refuse_late(self) -> None:
        while True:
            link, _ = await self._arrivals.next()
            await refuse(link, "too late: this version is being sent already, take it from an agent that has it")

    # --- steps, each repeated in a new group after a loss ---

    async def _through(self, step: Any) -> None:
        while True:
            try:
                if self._group is None:
                    await self._regroup()
                await step()
                return
            except (MemberGone, GroupBroken, TransportBroken) as error:
                await self._drop_group(error)

    async def _nothing(self) -> None:
        self._audience.look()

    async def _regroup(self) -> None:
        living = self._audience.living
        if not living:
            raise SessionError(self._nobody_left())
        self._group = await self._groups.open(self._audience, self._choose_digest)
        for number in list(self._kept):
            await self._forward(number)

    def _choose_digest(self, gpu: bool) -> str:
        """Once: all that is sent in this version has the same."""
        if not self.digest:
            self.digest = _common_digest(self._audience.living, _ON_GPU if gpu else _ON_HOST)
        return self.digest

    async def _drop_group(self, error: Exception) -> None:
        self._regroups += 1
        if not isinstance(error, MemberGone) and self._regroups > REGROUPS:
            raise SessionError(f"the transfer group broke {self._regroups} times, at last: {error}") from error
        if self._group is not None:
            self._group.abort()
            self._groups.forget()
            self._group = None
        if self._transfers:
            _, going_on = await asyncio.wait(self._transfers, timeout=STUCK_SECONDS)
            if going_on:
                self._wire = ThreadPoolExecutor(1, "weights-send")
            self._transfers.clear()
        for kept in self._kept.values():
            kept.announced = kept.sent = False
            for member in self._audience.living:
                member.ready.discard(kept.number)
                member.took.discard(kept.number)
        with contextlib.suppress(MemberGone):
            if isinstance(error, TransportBroken):
                await self._hear_of_loss()

    async def _hear_of_loss(self) -> None:
        """A broken group is felt before the end of its peer's process is heard of."""
        for _ in range(10):
            await asyncio.sleep(0.05)
            with contextlib.suppress(GroupBroken):
                self._audience.look()

    async def _forward(self, number: int) -> None:
        """Announces the bucket, then sends off those before it: the agents answer while others travel. When nothing
        travels, it need not wait for the next, which may be long in coming."""
        kept, audience, group = self._kept.get(number), self._audience, self._group
        assert group is not None
        if kept is not None and not kept.announced:
            while len([n for n in self._kept if n < number]) >= AHEAD:
                await self._one_taken()
            if kept.loaded_for != audience.group:
                kept.details = await self._in(self._loader, self._load, kept, group)
                kept.loaded_for = audience.group
            audience.under_way(number)
            await audience.tell(audience.living, lambda _: Announced.of(number, kept.bucket, kept.details))
            kept.announced = True
            self._times.mark("last bucket announced" if number else "first")
        for earlier in [n for n in self._kept if n < number]:
            await self._send_off(earlier)
        if number in self._kept and (group.pulled or not self._travelling()):
            await self._send_off(number)

    async def _send_off(self, number: int) -> None:
        kept, audience, group = self._kept[number], self._audience, self._group
        assert group is not None
        if kept.sent:
            return
        if not group.pulled:
            await audience.until(lambda m: number in m.ready, PATIENCE, f"answer for bucket {number}")
            await self._landed(QUEUED - 1)
        await audience.tell(audience.living, lambda _: Go(number))
        audience.look()
        kept.sent = True
        if not group.pulled:
            seconds = audience.remaining(PATIENCE + QUEUED * kept.bucket.size / SLOWEST)
            transfer = asyncio.ensure_future(self._in(self._wire, self._put_on_the_wire, group, number, seconds))
            transfer.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._transfers.append(transfer)

    def _put_on_the_wire(self, group: SendingGroup, number: int, seconds: float) -> None:
        if group is self._broken:  # agents would take it for the one that failed
            raise TransportBroken("a bucket before it has not gone")
        try:
            group.send(number, seconds)
        except TransportBroken:
            self._broken = group
            raise

    def _travelling(self) -> bool:
        return any(not transfer.done() for transfer in self._transfers)

    def _load(self, kept: _Kept, group: SendingGroup) -> dict[str, str]:
        begun = time.monotonic()
        algorithm = "" if kept.bucket.digest else self.digest
        if group.gpu:
            pieces: Sequence[Any] = [group.buffer(kept.number, kept.bucket.size)]
            digest = kept.outgoing.write_flat(pieces[0], algorithm)
        else:
            pieces = kept.outgoing.pieces()
            digest = kept.outgoing.digest(algorithm, pieces) if algorithm else ""
        if digest:
            self._sent[kept.number] = kept.bucket = Bucket(kept.bucket.tensors, digest)
        details = group.load(kept.number, pieces)
        self._times.packing += time.monotonic() - begun
        return details

    async def _landed(self, but: int = 0) -> None:
        """All that travel, `but` so many, have been sent off whole."""
        while len(self._transfers) > but:
            while not self._transfers[0].done():
                await asyncio.wait([self._transfers[0]], timeout=0.05)
                self._audience.look()
            await self._transfers.popleft()

    async def _one_taken(self) -> None:
        await self._taken(min(self._kept))

    async def _all_taken(self) -> None:
        for number in list(self._kept):
            await self._send_off(number)
        await self._landed()
        while self._kept:
            await self._one_taken()

    async def _taken(self, number: int) -> None:
        size = self._kept[number].bucket.size
        await self._audience.until(
            lambda m: number in m.took, PATIENCE + AHEAD * size / SLOWEST, f"confirm bucket {number}"
        )
        del self._kept[number]
        self._audience.taken(number)
        assert self._group is not None
        self._group.free(number)

    async def _all_sealed(self) -> None:
        await self._audience.until(lambda m: m.sealed is not None, PATIENCE, "seal the weights")

    async def _in(self, pool: ThreadPoolExecutor, call: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(pool, call, *arguments)

    # --- the end ---

    def _nobody_left(self) -> str:
        reasons = "; ".join(f"{m.name}: {m.gone}" for m in self._audience.members.values() if m.gone)
        return f"no agent is left to send to ({reasons})" if reasons else "no agent came"

    def _report(self, manifest: Manifest) -> SendReport:
        sealed = [member.sealed for member in self._audience.living if member.sealed is not None]
        if len({one.root for one in sealed}) > 1:
            raise SessionError(f"the agents hold different weights: {', '.join(sorted({s.root[:12] for s in sealed}))}")
        log.info("sent %s by %s: %s", self._sending.version, self._groups.transport, self._times.words())
        return SendReport(
            transaction=self._audience.living[0].hello.transaction,
            root=sealed[0].root,
            size=manifest.size,
            seconds=self._times.seconds,
            transport=self._groups.transport,
            nonfinite=sealed[0].nonfinite,
            deliveries=self.deliveries(),
        )

    def deliveries(self) -> tuple[Delivery, ...]:
        spent = self._times.seconds
        return tuple(Delivery(m.name, m.gone, spent) for m in self._audience.members.values())

    async def close(self, reason: str, lasting: bool) -> None:
        if self._late is not None:
            self._late.cancel()
        if any(member.sealed is None for member in self._audience.living) and self._group is not None:
            self._group.abort()
            self._groups.forget()
        await self._audience.dismiss(reason, lasting=lasting)
        self._loader.shutdown(wait=False)
        self._wire.shutdown(wait=False)


def _common_digest(members: Sequence[Member], preferred: Sequence[str]) -> str:
    for algorithm in preferred:
        if algorithm in ALGORITHMS and all(algorithm in member.hello.digests for member in members):
            return algorithm
    raise SessionError(f"trainer and agents have none of the digests {', '.join(preferred)} in common")
