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
        self._open: _Exchange | None = None

    async def call(self, method: str, target: str, token: str, body: bytes, seconds: float) -> Answer:
        """target: path and query. Raises OSError, TimeoutError and BadAnswer. A call may be sent twice: when the pod
        closes an idle connection at the very moment."""
        head = (
            f"{method} {target} HTTP/1.1\r\nHost: {self._host}\r\nAuthorization: Bearer {token}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        request = head.encode("ascii") + body
        until = asyncio.get_running_loop().time() + seconds
        try:
            if self._open is not None and not self._open.ended:
                try:
                    return await self._exchange(self._open, request, until)
                except ConnectionError:
                    self.close()
            self.close()
            return await self._exchange(await self._connected(until), request, until)
        except BaseException:
            self.close()  # the rest of an answer must not be taken for the next one
            raise

    def close(self) -> None:
        """At once: what was not sent yet is not worth waiting for. The socket is gone in the event loop's next turn."""
        if self._open is not None:
            self._open.abort()
            self._open = None

    async def _connected(self, until: float) -> _Exchange:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout_at(min(loop.time() + CONNECT_SECONDS, until)):
            _, self._open = await loop.create_connection(lambda: _Exchange(self._body_bytes), self._ip, self._port)
        return self._open

    async def _exchange(self, exchange: _Exchange, request: bytes, until: float) -> Answer:
        answer = await exchange.ask(request, until)
        if exchange.ended:
            self.close()
        return answer


class _Exchange(asyncio.Protocol):
    """The two ends' bytes on one connection. ended: nothing more can be asked on it. Without asyncio's streams, which
    wake a task for the head of an answer and again for its body."""

    def __init__(self, body_bytes: int) -> None:
        self.ended = False
        self._body_bytes = body_bytes
        self._received = bytearray()
        self._head: tuple[int, int, int, bool] | None = None  # status, where the body begins and ends, last answer
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Answer] | None = None
        self._until = 0.0
        self._timer: asyncio.TimerHandle | None = None  # set anew only when it has come: most answers come before it

    def ask(self, request: bytes, until: float) -> asyncio.Future[Answer]:
        """until: when it is given up, by the event loop's clock."""
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        self._answer, self._until = loop.create_future(), until
        if self._timer is None or self._timer.when() > until:
            self._set_timer(loop)
        self._transport.write(request)
        return self._answer

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(self._until, self._time_is_over, loop)

    def _time_is_over(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._answer is None or self._answer.done():
            return
        if loop.time() < self._until:
            self._set_timer(loop)
        else:
            self._fail(TimeoutError())

    def abort(self) -> None:
        self.ended = True
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            answer = self._whole_answer()
        except BadAnswer as error:
            self._fail(error)
            return
        if answer is not None and self._answer is not None and not self._answer.done():
            self._answer.set_result(answer)

    def eof_received(self) -> None:
        self._fail(ConnectionResetError("the connection was closed before the end of an answer"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(exc or ConnectionResetError("the connection was closed before the end of an answer"))

    def _fail(self, error: Exception) -> None:
        self.ended = True
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    def _whole_answer(self) -> Answer | None:
        """None while it is not there. Raises BadAnswer, also for what nobody has asked for."""
        if self._answer is None or self._answer.done():
            raise BadAnswer("what was not asked")
        if self._head is None:
            end = self._received.find(_HEAD_END)
            if end > HEAD_BYTES or (end < 0 and len(self._received) > HEAD_BYTES):
                raise BadAnswer("with endless headers")
            if end < 0:
                return None
            status, length, last = _parsed(bytes(self._received[:end]))
            if length > self._body_bytes:
                raise BadAnswer(f"more than {self._body_bytes >> 20} MiB")
            begin = end + len(_HEAD_END)
            self._head = status, begin, begin + length, last
        status, begin, end, last = self._head
        if len(self._received) < end:
            return None
        body = bytes(self._received[begin:end])
        self.ended = last or len(self._received) > end  # what follows was not asked for
        self._received.clear()
        self._head = None
        return Answer(status, body)


def _parsed(head: bytes) -> tuple[int, int, bool]:
    """Status, length of the body, and whether the connection ends with it. Raises BadAnswer."""
    first, *lines = head.split(b"\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    version, _, rest = first.partition(b" ")
    status, length = rest[:3], headers.get(b"content-length", b"")
    if not version.startswith(b"HTTP/1.") or not status.isdigit():
        raise BadAnswer("something that is not HTTP")
    if not length.isdigit() or b"transfer-encoding" in headers:
        raise BadAnswer(f"{status.decode()} without a length")
    return int(status), int(length), headers.get(b"connection", b"").lower() == b"close"
