"""Where agents come to a trainer's sender: one listening socket, which hands each agent to whoever sends the version
that it asks for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator

from .link import Link
from .session import MAX_WORD, RELEASE, Cancel, Hello, LinkLost

HELLO_SECONDS = 10.0
UNGREETED_MAX = 64  # connections of one host that have not said hello: anybody may open them
ENDED = "the trainer's sender has ended"
_LOG = logging.getLogger(__name__)


class Arrivals:
    """Agents that ask for one version, in the order in which they come."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[Link, Hello]] = asyncio.Queue()

    def put(self, link: Link, hello: Hello) -> None:
        self._queue.put_nowait((link, hello))

    async def next(self) -> tuple[Link, Hello]:
        return await self._queue.get()

    async def turn_away(self) -> None:
        while not self._queue.empty():
            link, _ = self._queue.get_nowait()
            await refuse(link, ENDED)


class Reception:
    """Open it in the event loop that sends; it may stay open over many versions."""

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None
        self._expected: dict[tuple[str, str], Arrivals] = {}
        self._greeting: dict[asyncio.Task[None], str] = {}
        self.port = 0

    async def open(self, host: str, port: int) -> None:
        """port 0: any. Raises OSError."""
        self._server = await asyncio.start_server(self._arrive, host, port, limit=1 << 20)
        self.port = self._server.sockets[0].getsockname()[1]

    @contextlib.contextmanager
    def expecting(self, version: str, mode: str) -> Iterator[Arrivals]:
        """mode as in Hello. Everybody else is refused with a sentence."""
        if (version, mode) in self._expected:
            raise ValueError(f"version {version} is being sent already")
        arrivals = self._expected[version, mode] = Arrivals()
        try:
            yield arrivals
        finally:
            del self._expected[version, mode]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._greeting:
            task.cancel()
        await asyncio.gather(*self._greeting, return_exceptions=True)

    async def _arrive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host = str((writer.get_extra_info("peername") or ("?",))[0])
        if list(self._greeting.values()).count(host) >= UNGREETED_MAX:
            writer.transport.abort()
            return
        # An agent sends words, never weights.
        task = asyncio.create_task(self._greet(Link(reader, writer, largest=(MAX_WORD, 0))))
        self._greeting[task] = host
        task.add_done_callback(lambda done: self._greeting.pop(done))

    async def _greet(self, link: Link) -> None:
        try:
            hello = await link.receive(HELLO_SECONDS)
        except (LinkLost, TimeoutError) as error:
            _LOG.info("somebody at %s said no hello: %s", link.peer, error)
            await link.close()
            return
        except asyncio.CancelledError:
            await link.close()
            raise
        if not isinstance(hello, Hello):
            await refuse(link, f"the first word must be hello, this was {hello.kind}")
        elif hello.release != RELEASE:
            await refuse(link, f"this sender speaks release {RELEASE} of the protocol, the agent {hello.release}")
        elif (arrivals := self._expected.get((hello.version, hello.mode))) is not None:
            arrivals.put(link, hello)
        else:
            sent = ", ".join(f"{version} ({mode})" for version, mode in self._expected) or "nothing"
            await refuse(
                link, f"version {hello.version} ({hello.mode}) is not sent here now: this trainer sends {sent}"
            )


async def refuse(link: Link, reason: str, *, lasting: bool = False) -> None:
    with contextlib.suppress(LinkLost):
        await link.send(Cancel(reason, lasting))
    await link.close()
