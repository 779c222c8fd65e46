"""The agents that one version is sent to: what each has said so far, and waiting until all that are left have said what
must come before the next step."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .link import Link
from .reception import refuse
from .session import (
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
)

FOREVER = 1e9


@dataclass
class Member:
    """rank: in the transfer group, from 1. unable: the group that it could not join or that broke. wrong: it found that
    the weights are not for its model. gone: why it takes no part any more."""

    link: Link
    hello: Hello
    rank: int = 0
    joined: str = ""
    unable: str = ""
    reason: str = ""
    wrong: bool = False
    ready: set[int] = field(default_factory=set)
    took: set[int] = field(default_factory=set)
    sealed: Sealed | None = None
    gone: str = ""

    @property
    def name(self) -> str:
        return self.hello.receiver


class MemberGone(Exception):
    """An agent was lost: the others need a group without it."""


class GroupBroken(Exception):
    """All agents are there, but one cannot use the group."""


class WrongWeights(SessionError):
    """An agent found that these weights are not for its model; nobody may take them."""


class NotInTime(SessionError):
    """The deadline of the whole is over."""


class Audience:
    def __init__(self, deadline: float) -> None:
        """deadline: time.monotonic() at which all must be over."""
        self.deadline = deadline
        self.members: dict[str, Member] = {}
        self.group = ""  # of which a member may say that it is of no use
        self._readers: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._under_way: set[int] = set()
        self._noticed = 0

    @property
    def living(self) -> list[Member]:
        return [member for member in self.members.values() if not member.gone]

    def remaining(self, seconds: float = FOREVER) -> float:
        """Of `seconds`, what the deadline leaves. Raises NotInTime when it leaves nothing."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise NotInTime("the time for sending is over")
        return min(left, seconds)

    def add(self, link: Link, hello: Hello) -> Member:
        member = self.members[hello.receiver] = Member(link, hello)
        self._readers.append(asyncio.create_task(self._read(member)))
        return member

    async def until(self, said: Callable[[Member], bool], seconds: float, what: str) -> None:
        """Until every agent that is left has said so; those that have not in time are gone. Raises MemberGone when any
        went, GroupBroken, WrongWeights, NotInTime."""
        end = time.monotonic() + self.remaining(seconds)
        while True:
            self._changed.clear()
            self.look()
            late = [member for member in self.living if not said(member)]
            if not late:
                return
            left = end - time.monotonic()
            if left <= 0:
                self.remaining()
                for member in late:
                    self.lose(member, f"it did not {what} within {seconds:.0f} s")
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()

    def look(self) -> None:
        """Raises MemberGone for one that went since the last look, GroupBroken."""
        gone = sum(1 for member in self.members.values() if member.gone)
        for member in self.members.values():
            if member.wrong:
                raise WrongWeights(f"{member.name}: {member.gone}")
        if gone != self._noticed:
            self._noticed = gone
            raise MemberGone
        for member in self.living:
            if member.unable and member.unable == self.group:
                raise GroupBroken(f"{member.name}: {member.reason}")

    async def tell(self, members: Sequence[Member], message: Callable[[Member], Message]) -> None:
        """Whoever cannot be told is gone, which the next look() says."""

        async def one(member: Member) -> None:
            try:
                await member.link.send(message(member))
            except LinkLost as error:
                self.lose(member, str(error))

        await asyncio.gather(*(one(member) for member in members))

    def under_way(self, number: int) -> None:
        """This bucket is announced now: what agents answer for another one is not kept."""
        self._under_way.add(number)

    def taken(self, number: int) -> None:
        """All have it."""
        self._under_way.discard(number)
        for member in self.members.values():
            member.ready.discard(number)
            member.took.discard(number)

    def lose(self, member: Member, reason: str) -> None:
        member.gone = member.gone or reason
        self._changed.set()

    async def dismiss(self, reason: str, *, lasting: bool = False) -> None:
        """All that were not thanked by their own last word are told why it ends."""
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        await asyncio.gather(
            *(
                member.link.close() if member.sealed else refuse(member.link, reason, lasting=lasting)
                for member in self.members.values()
            )
        )

    async def _read(self, member: Member) -> None:
        try:
            while not member.gone:
                self._hear(member, await member.link.receive(FOREVER))
                self._changed.set()
        except LinkLost as error:
            if member.sealed is None:
                self.lose(member, str(error))
            self._changed.set()

    def _hear(self, member: Member, message: Message) -> None:
        match message:
            case Joined(group):
                member.joined = group
            case Unable(group, reason):
                member.unable, member.reason = group, reason
            case Ready(number, group):
                if group == self.group and number in self._under_way:
                    member.ready.add(number)
            case Took(number, group):
                if group == self.group and number in self._under_way:
                    member.took.add(number)
            case Sealed():
                member.sealed = message
            case Refused(reason, _, lasting):
                member.wrong = member.wrong or lasting
                self.lose(member, reason)
            case _:
                self.lose(member, f"it said {message.kind}, which has no meaning here")
