"""A kept connection to the program in one pod, for one HTTP call after the other.

An order to a fleet is a call to each of its pods, and all engines stand still until the last has it. aiohttp's client,
which does all else here, needs more than three times the CPU time for one (`make bench-barrier` measures both): it is
made for any server, this for our own, whose answers are small and tell their length."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from ..protocol.pod import address_of

CONNECT_SECONDS = 3.0
HEAD_BYTES = 16 << 10  # an answer's status line and headers
_HEAD_END = b"\r\n\r\n"


class BadAnswer(Exception):
    """What came back is no answer that our pods give, in a few words that follow `answers`."""


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes


class PodConnection:
    """One call at a time. body_bytes: how large an answer's body may be."""

    def __init__(self, ip: str, port: int, body_bytes: int) -> None:
        self._ip = ip
        self._port = port
        self._host = address_of(ip, port)
        self._body_bytes = body_bytes
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def call(self, method: str, target: str, token: str, body: bytes, seconds: float) -> Answer:
        """target: path and query. Raises OSError, TimeoutError and BadAnswer. A call may be sent twice: when the pod
        closes an idle connection at the very moment."""
        head = (
            f"{method} {target} HTTP/1.1\r\nHost: {self._host}\r\nAuthorization: Bearer {token}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        request = head.encode("ascii") + body
        try:
            async with asyncio.timeout(seconds):
                if self._streams is not None and not self._streams[0].at_eof():
                    try:
                        return await self._exchange(*self._streams, request)
                    except ConnectionError:
                        self.close()
                self.close()
                async with asyncio.timeout(CONNECT_SECONDS):
                    self._streams = await asyncio.open_connection(self._ip, self._port, limit=HEAD_BYTES)
                return await self._exchange(*self._streams, request)
        except BaseException:
            self.close()  # the rest of an answer must not be taken for the next one
            raise

    def close(self) -> None:
        """At once: what was not sent yet is not worth waiting for. The socket is gone in the event loop's next turn."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> Answer:
        writer.write(request)
        try:
            head = await reader.readuntil(_HEAD_END)
            status, length, last = _parsed(head)
            if length > self._body_bytes:
                raise BadAnswer(f"more than {self._body_bytes >> 20} MiB")
            body = await reader.readexactly(length)
        except asyncio.IncompleteReadError as error:
            raise ConnectionResetError("the connection was closed before the end of an answer") from error
        except asyncio.LimitOverrunError as error:
            raise BadAnswer("with endless headers") from error
        if last:
            self.close()
        return Answer(status, body)


def _parsed(head: bytes) -> tuple[int, int, bool]:
    """Status, length of the body, and whether the connection ends with it. Raises BadAnswer."""
    first, *lines = head.removesuffix(_HEAD_END).split(b"\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    version, _, rest = first.partition(b" ")
    status, length = rest[:3], headers.get(b"content-length", b"")
    if not version.startswith(b"HTTP/1.") or not status.isdigit():
        raise BadAnswer("something that is not HTTP")
    if not length.isdigit() or b"transfer-encoding" in headers:
        raise BadAnswer(f"{status.decode()} without a length")
    return int(status), int(length), headers.get(b"connection", b"").lower() == b"close"
