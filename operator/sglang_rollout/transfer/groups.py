"""Which transport reaches a set of agents, and the group that was made for them last: it is used again while sender,
epoch and members stay the same."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from .audience import Audience, GroupBroken, Member
from .session import Welcome
from .transports import Meeting, SendingGroup, Transport, TransportBroken, TransportUnable

GATHER_SECONDS = 20.0
TRIES = 2


class NoTransport(Exception):
    """Nothing that trainer and agents can all do; the sentence says what each can."""


class GroupKeeper:
    """One for each sender. Not for two versions at once."""

    def __init__(self, transports: Sequence[Transport], *, host: str = "") -> None:
        """transports: the best first. host: the sender's address as agents see it; "": the one they came to."""
        self._transports = {transport.name: transport for transport in transports}
        self._host = host
        self._key: tuple[int, tuple[str, ...]] | None = None
        self._id = ""
        self._group: SendingGroup | None = None
        self._failed: Counter[str] = Counter()  # how often each was tried in vain for the present members
        self.transport = ""

    async def open(self, audience: Audience, digest: Callable[[bool], str]) -> SendingGroup:
        """A group that all living members have joined. digest: which one, for a group that sends from GPU memory or for
        one that does not. Raises NoTransport, and what until() raises."""
        members = audience.living
        key = (members[0].hello.epoch, tuple(sorted(member.name for member in members)))
        if self._group is not None and key == self._key and all(self._id in m.hello.groups for m in members):
            return await self._greet(audience, self._group, digest(self._group.gpu))
        self.forget()
        if key != self._key:
            self._failed.clear()
        self._key = key
        for rank, member in enumerate(sorted(members, key=lambda member: member.name), 1):
            member.rank = rank
        reasons: list[str] = []
        while True:
            transport = self._choose(members, reasons)
            try:
                group = await self._make(audience, transport, digest)
            except (TransportUnable, GroupBroken) as error:
                self._failed[transport.name] += 1
                reasons.append(f"{transport.name}: {error}")
                continue
            self._group, self.transport = group, transport.name
            return group

    def forget(self) -> None:
        """The group is not used again."""
        if self._group is not None:
            self._group.abort()
        self._group, self._id = None, ""

    def _choose(self, members: Sequence[Member], reasons: Sequence[str]) -> Transport:
        for name, transport in self._transports.items():
            offers = [member.hello.offers.get(name) for member in members]
            if self._failed[name] >= TRIES or any(offer is None for offer in offers):
                continue
            if transport.suits([offer for offer in offers if offer is not None]):
                return transport
        if reasons:
            raise NoTransport(f"trainer and agents found no way for the weights: {'; '.join(reasons)}")
        raise NoTransport(
            f"no transport is left between the trainer ({', '.join(self._transports) or 'none'}) and its agents "
            f"({_offered(members)}): set weights.source.distributed.transport to one that both can use, or to Auto"
        )

    async def _make(self, audience: Audience, transport: Transport, digest: Callable[[bool], str]) -> SendingGroup:
        members = audience.living
        seconds = audience.remaining(GATHER_SECONDS)
        self._id = secrets.token_hex(8)
        group = transport.open(Meeting(self._id, self._host or members[0].link.own, len(members) + 1, seconds))
        gathering = _beside(lambda: group.gather(seconds))
        try:
            await self._greet(audience, group, digest(group.gpu))
            async with asyncio.timeout(seconds):
                await gathering
        except (TransportBroken, TimeoutError) as error:
            group.abort()
            audience.look()
            raise GroupBroken(str(error) or "the group was not complete in time") from error
        except BaseException:
            group.abort()
            raise
        return group

    async def _greet(self, audience: Audience, group: SendingGroup, digest: str) -> SendingGroup:
        audience.group = identity = self._id
        world = len(audience.living) + 1
        await audience.tell(
            audience.living,
            lambda m: Welcome(group.name, identity, m.rank, world, digest, group.details(m.rank)),
        )
        await audience.until(lambda m: m.joined == identity, GATHER_SECONDS, "join the transfer group")
        return group


def _beside(work: Callable[[], None]) -> asyncio.Future[None]:
    """In a thread that nobody has to wait for, not even the interpreter at its end: it may go on for a while when an
    agent is lost."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def tell(error: BaseException | None) -> None:
        if not future.done():
            future.set_result(None) if error is None else future.set_exception(error)

    def run() -> None:
        found: BaseException | None = None
        try:
            work()
        except BaseException as error:
            found = error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell, found)

    threading.Thread(target=run, name="weights-gather", daemon=True).start()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


def _offered(members: Sequence[Member]) -> str:
    said: Mapping[str, str] = {member.name: " and ".join(member.hello.offers) or "none" for member in members}
    return "; ".join(f"{name}: {offers}" for name, offers in said.items())
