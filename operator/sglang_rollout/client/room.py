"""The thread in a trainer that agents talk to: an event loop with the listening socket and the transfer groups, beside
whatever the trainer does."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import Any, TypeVar
from urllib.parse import urlsplit

from ..transfer.groups import GroupKeeper
from ..transfer.reception import Reception
from ..transfer.sender import Outgoing
from ..transfer.transports.available import sender_transports
from .errors import PublishRefused

T = TypeVar("T")
LOOK_SECONDS = 0.2
END_SECONDS = 10.0


class SenderRoom:
    """Lives from the first version that is sent until close()."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="weights-sender", daemon=True)
        self._thread.start()
        self.reception = Reception()
        self._keepers: dict[str, GroupKeeper] = {}
        self.live_groups: Any = None  # giving.EngineGroups, once something was sent into engines

    def open(self, listen: str, port: int) -> int:
        """The port. Raises OSError."""
        self.call(self.reception.open(listen, port))
        return self.reception.port

    @classmethod
    def opened(cls, address: str, port: int) -> SenderRoom:
        """address: by which agents reach this process, "" where that is not known; port 0: any. Raises
        PublishRefused."""
        if not address:
            raise PublishRefused(
                "the engines' agents must reach this process, and its address is not known: give address= to "
                "RolloutFleet.connect(), an address of this host that pods of the cluster can connect to"
            )
        room = cls()
        try:
            room.open("::" if ":" in address else "0.0.0.0", port)  # noqa: S104 - agents come from anywhere
        except OSError as error:
            room.close()
            raise PublishRefused(f"port {port} cannot be listened on: {error.strerror}") from error
        return room

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def start(self, work: Coroutine[Any, Any, T]) -> Job[T]:
        """Returns when it has run up to its first wait."""
        job = self.call(_begun(work))
        self.call(asyncio.sleep(0))
        return job

    def keeper(self, transport: str, host: str) -> GroupKeeper:
        """Of the groups by this transport, or "Auto"."""
        if transport not in self._keepers:
            self._keepers[transport] = GroupKeeper(sender_transports(transport), host=host)
        return self._keepers[transport]

    def feed(self) -> Feed:
        return Feed(self._loop)

    def close(self) -> None:
        self.call(self.reception.close())
        for keeper in self._keepers.values():
            keeper.forget()
        if self.live_groups is not None:
            self.live_groups.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            rest = asyncio.all_tasks(self._loop)
            for task in rest:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*rest, return_exceptions=True))
        finally:
            self._loop.close()


class Job(concurrent.futures.Future[T]):
    """Of what goes on in the room's event loop: done when nothing of it goes on any more."""

    def __init__(self, task: asyncio.Task[T]) -> None:
        super().__init__()
        self._task = task
        task.add_done_callback(self._over)

    def cancel(self) -> bool:
        self._task.get_loop().call_soon_threadsafe(self._task.cancel)
        return True

    def end(self) -> None:
        """Returns when it has told its agents, after a while in any case."""
        if not self.done():
            self.cancel()
            concurrent.futures.wait([self], END_SECONDS)

    def _over(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            super().cancel()
            self.set_running_or_notify_cancel()
        elif (error := task.exception()) is not None:
            self.set_exception(error)
        else:
            self.set_result(task.result())


async def _begun(work: Coroutine[Any, Any, T]) -> Job[T]:
    return Job(asyncio.get_running_loop().create_task(work))


class TrainerStopped(Exception):
    """In the midst of its iterator, by a signal."""


class Feed:
    """Buckets from the trainer's thread to the sender's."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: asyncio.Queue[Outgoing | Exception | None] = asyncio.Queue(1)

    async def stream(self) -> AsyncIterator[Outgoing]:
        while (one := await self._waiting.get()) is not None:
            if isinstance(one, Exception):
                raise one
            yield one

    def give(self, buckets: Iterable[Outgoing], over: Iterable[concurrent.futures.Future[Any]]) -> None:
        """Blocks until all are taken, or one of `over` is done. An iterator of the trainer's is always run to its end,
        since other ranks may take part in what it does. Raises what the iterator raises."""
        ends = list(over)
        wanted = True
        try:
            for one in buckets:
                wanted = wanted and self._put(one, ends)
        except Exception as error:
            self._put(error, ends)
            raise
        except BaseException as error:  # as itself it would end the sender's event loop
            self._put(TrainerStopped(f"the trainer was stopped: {type(error).__name__}"), ends)
            raise
        self._put(None, ends)

    def _put(self, one: Outgoing | Exception | None, ends: list[concurrent.futures.Future[Any]]) -> bool:
        putting = asyncio.run_coroutine_threadsafe(self._waiting.put(one), self._loop)
        while not any(end.done() for end in ends):
            with contextlib.suppress(TimeoutError):
                putting.result(LOOK_SECONDS)
                return True
        putting.cancel()
        return False


def own_address(server: str) -> str:
    """By which this host reaches `server`, a URL; "" when that is itself or cannot be told."""
    parts = urlsplit(server)
    try:
        family, kind, _, _, target = socket.getaddrinfo(parts.hostname, parts.port or 443, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing
            found = str(probe.getsockname()[0])
    except OSError:
        return ""
    return "" if found.startswith("127.") or found == "::1" else found
