"""Links to the programs in a fleet's pods, one a pod: what the operator wants goes out by PUT, what the pod reports
comes in by long poll. Nobody waits for a pod: what comes back calls `on_change`."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from ..protocol.wire import BatchEncoder
from .lease import LeaderLease
from .pod_calls import CallFailed, Dialect, PodCaller, R, Target
from .tokens import FleetTokens

log = logging.getLogger(__name__)

PUT_SECONDS = 5.0
POLL_SECONDS = 25.0
SILENT_SECONDS = 15.0  # a report is believed for so long after its pod stopped answering
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
# Of all calls of this process. It begins above those of an earlier one, whose term may be the same if the Lease was
# deleted between them.
_SERIALS = itertools.count(time.time_ns())
_FILLED_IN = frozenset({"lease_term", "serial"})  # of an order, when it is sent


class Desired(Protocol):
    """AgentDesired or RouterDesired."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def lease_term(self) -> int: ...


D = TypeVar("D", bound=Desired)
FleetKey = tuple[str, str]


@dataclass
class LinkContext:
    """What all links share. on_call: told of every call: operation, status code (or "error"), seconds."""

    tokens: FleetTokens
    lease: LeaderLease
    on_call: Callable[[str, str, float], None] = lambda *_: None
    clock: Callable[[], float] = time.monotonic
    silent_seconds: float = SILENT_SECONDS
    poll_seconds: float = POLL_SECONDS


@dataclass
class PodLink(Generic[D, R]):
    """The link to one pod."""

    target: Target
    dialect: Dialect[R]
    context: LinkContext
    on_change: Callable[[], None]
    settled: bool = False  # it has answered or failed once
    _report: R | None = None
    _wanted: D | None = None
    _members: bytes = b""  # of the order as JSON, without what is filled in
    _sent: tuple[str, D] | None = None  # to which process, what; None while a call may be under way
    _failing_since: float | None = None
    _problem: str = ""
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _drop: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        """Two connections: an order must not wait for the end of a long poll."""
        shared = (self.target, self.dialect, self.context.tokens, self.context.on_call)
        self._polls, self._orders = PodCaller(*shared), PodCaller(*shared)

    def open(self) -> None:
        self._tasks = [self._task("listen", self._listen()), self._task("drive", self._drive())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._polls.close()
        self._orders.close()
        await asyncio.sleep(0)  # for their sockets to be gone
        if self._drop is not None:
            self._drop.cancel()

    @property
    def report(self) -> R | None:
        """The last report, unless the pod has been silent for too long."""
        return None if self.silent else self._report

    @property
    def silent(self) -> str:
        """Why there is no report to believe; empty while there is one, or while it is too early to say."""
        if self._failing_since is None or self.context.clock() - self._failing_since < self.context.silent_seconds:
            return ""
        return self._problem

    @property
    def untold(self) -> bool:
        """The pod may act on another order than the one that its report is of: it was sent one and has not answered,
        or somebody else gave it one."""
        return self._sent is None or self._unsent() is not None

    def want(self, desired: D, encoder: BatchEncoder) -> None:
        """From now on the pod is told this, again whenever its program restarts. Returns at once."""
        if desired != self._wanted:
            self._wanted = desired
            self._members = encoder.members(desired, _FILLED_IN)
            self._wake.set()

    async def _listen(self) -> None:
        pause = FIRST_PAUSE
        while True:
            query = ""
            seconds = PUT_SECONDS
            if self._report is not None and self._failing_since is None:
                query = f"&after={self._report.revision}&wait={self.context.poll_seconds:g}"
                seconds += self.context.poll_seconds
            try:
                self._take(await self._polls.get_report(query, seconds))
                pause = FIRST_PAUSE
            except CallFailed as error:
                self._failed(str(error))
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 jitter
                pause = min(pause * 2, LONGEST_PAUSE)

    async def _drive(self) -> None:
        pause = FIRST_PAUSE
        while True:
            desired = self._unsent()
            if desired is None:
                await self._wake.wait()
                self._wake.clear()
                continue
            if not self.context.lease.leading:
                return  # the process is about to end; a new leader makes new links
            term = self.context.lease.term
            try:
                body = b'{"leaseTerm":%d,"serial":%d,%b}' % (term, next(_SERIALS), self._members)
                self._sent = None  # a call that fails may have been heard all the same
                report = await self._orders.put_desired(body, PUT_SECONDS)
                self._sent = (self.dialect.start_of(report), desired)
                self._take(report)
                self.on_change()
                pause = FIRST_PAUSE
            except CallFailed as error:
                if error.status == 409:
                    await self._go_above_its_term(term)
                self._failed(str(error))
                try:
                    async with asyncio.timeout(pause * random.uniform(0.5, 1.0)):  # noqa: S311 jitter
                        await self._wake.wait()
                except TimeoutError:
                    pass
                self._wake.clear()
                pause = min(pause * 2, LONGEST_PAUSE)

    async def _go_above_its_term(self, refused: int) -> None:
        """The pod has obeyed a higher term than the lease has: of a Lease that was deleted since. Its report says
        which; where it does not, in few steps."""
        try:
            self._take(await self._orders.get_report("", PUT_SECONDS))
        except CallFailed as error:
            log.debug("%s", error)
        if self.context.lease.term <= refused and (self._report is None or self._report.lease_term <= refused):
            self.context.lease.need_term_above(2 * refused)

    def _unsent(self) -> D | None:
        """What the pod's present process has not been told yet."""
        told = self._sent is not None and self._sent[1] == self._wanted
        if told and self._report is not None and self._sent is not None:
            told = self._sent[0] == self.dialect.start_of(self._report)
        return None if told else self._wanted

    def _take(self, report: R) -> None:
        recovered = self._failing_since is not None or not self.settled
        self._failing_since, self._problem, self.settled = None, "", True
        if self._drop is not None:
            self._drop.cancel()
            self._drop = None
        if report.lease_term > self.context.lease.term:
            self.context.lease.need_term_above(report.lease_term)
        before = self._report
        start_of = self.dialect.start_of
        if before is not None and start_of(before) == start_of(report) and report.revision < before.revision:
            return  # the answer to an earlier call
        self._report = report
        if before is None or start_of(before) != start_of(report):
            self._wake.set()
        if recovered or before != report:
            self.on_change()

    def _failed(self, problem: str) -> None:
        first = not self.settled
        self._problem, self.settled = problem, True
        if self._failing_since is None:
            self._failing_since = self.context.clock()
            self._drop = asyncio.get_running_loop().call_later(self.context.silent_seconds + 0.01, self.on_change)
            log.debug("%s of %s: %s", self.dialect.name, self.target.name, problem)
        if first:
            self.on_change()

    def _task(self, what: str, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.create_task(coroutine, name=f"{what} {self.dialect.name} {self.target.name}")


class LinkPool(Generic[D, R]):
    """The links to all pods of one sort, by fleet and pod UID. on_change: told which fleet has news."""

    def __init__(self, dialect: Dialect[R], context: LinkContext, on_change: Callable[[FleetKey], None]) -> None:
        self._dialect = dialect
        self._context = context
        self._on_change = on_change
        self._links: dict[FleetKey, dict[str, PodLink[D, R]]] = {}
        self._news: dict[FleetKey, int] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def sync(self, fleet: FleetKey, targets: Mapping[str, Target]) -> None:
        """Links to exactly these pods; a pod whose address changed gets a new link."""
        links = self._links.setdefault(fleet, {})
        for uid, link in list(links.items()):
            if targets.get(uid) != link.target:
                self._close(links.pop(uid))
        for uid, target in targets.items():
            if uid not in links:
                links[uid] = PodLink(target, self._dialect, self._context, lambda: self._changed(fleet))
                links[uid].open()
        if not links:
            del self._links[fleet]
            self._news.pop(fleet, None)

    def of(self, fleet: FleetKey) -> Mapping[str, PodLink[D, R]]:
        return self._links.get(fleet, {})

    def news(self, fleet: FleetKey) -> int:
        """Grows with every change that a link has told."""
        return self._news.get(fleet, 0)

    def settled(self, fleet: FleetKey) -> bool:
        """Whether every pod of the fleet has answered or failed at least once."""
        return all(link.settled for link in self.of(fleet).values())

    def want(self, fleet: FleetKey, desired: Mapping[str, D]) -> None:
        links, encoder = self.of(fleet), BatchEncoder()
        for uid, wanted in desired.items():
            if uid in links:
                links[uid].want(wanted, encoder)

    async def close(self) -> None:
        for fleet in list(self._links):
            self.sync(fleet, {})
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _changed(self, fleet: FleetKey) -> None:
        self._news[fleet] = self._news.get(fleet, 0) + 1
        self._on_change(fleet)

    def _close(self, link: PodLink[D, R]) -> None:
        task = asyncio.create_task(link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
