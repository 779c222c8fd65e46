"""A kept connection to a pod: calls one after the other, what is done when it breaks, and answers that are none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from sglang_rollout.controller.pod_connection import Answer, BadAnswer, PodConnection

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


class Pod:
    """answers: what is sent for each request, in turn; b"" ends the connection. requests: as they came."""

    def __init__(self, answers: list[bytes]) -> None:
        self.answers = answers
        self.requests: list[bytes] = []
        self.connections = 0
        self.serving: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self.serving.add(task)
        try:
            while self.answers:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                answer = self.answers.pop(0)
                if not answer:
                    break
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()


@asynccontextmanager
async def connected(*answers: bytes, body_bytes: int = 1 << 20) -> AsyncIterator[tuple[Pod, PodConnection]]:
    pod = Pod(list(answers))
    server = await asyncio.start_server(pod.serve, "127.0.0.1", 0)
    connection = PodConnection("127.0.0.1", server.sockets[0].getsockname()[1], body_bytes)
    yield pod, connection
    connection.close()
    server.close()
    if pod.serving:
        await asyncio.wait(pod.serving, timeout=5)  # else the loop ends before they have closed their side


def call(connection: PodConnection, body: bytes = b"", seconds: float = 5.0) -> asyncio.Task[Answer]:
    return asyncio.create_task(connection.call("PUT", "/v1/desired?pod=u", "secret", body, seconds))


async def test_calls_go_one_after_the_other_over_one_connection() -> None:
    refused = b"HTTP/1.1 409 Conflict\r\ncontent-length: 5\r\n\r\nno..."
    async with connected(OK, refused, OK) as (pod, connection):
        assert await call(connection, b"one") == Answer(200, b"{}")
        assert await call(connection, b"two") == Answer(409, b"no...")
        assert await call(connection) == Answer(200, b"{}")
        assert pod.connections == 1
    assert [request.rpartition(b"\r\n\r\n")[2] for request in pod.requests] == [b"one", b"two", b""]
    assert pod.requests[0].startswith(b"PUT /v1/desired?pod=u HTTP/1.1\r\n")
    assert b"Authorization: Bearer secret\r\n" in pod.requests[0]


async def test_a_connection_that_the_pod_has_closed_meanwhile_is_made_anew() -> None:
    async with connected(OK, b"", OK) as (pod, connection):
        await call(connection)
        assert await call(connection, b"again") == Answer(200, b"{}"), "sent twice: it broke before an answer"
        assert pod.connections == 2


async def test_a_new_connection_that_breaks_is_an_error() -> None:
    async with connected(b"") as (_, connection):
        with pytest.raises(ConnectionError, match="before the end of an answer"):
            await call(connection)


async def test_an_answer_that_ends_its_connection_does_so() -> None:
    last = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
    async with connected(last, OK) as (pod, connection):
        await call(connection)
        await call(connection)
        assert pod.connections == 2


async def test_a_call_has_its_own_time_whatever_the_one_before_it_had() -> None:
    async with connected(OK, OK[:-1], OK, OK[:-1], OK) as (pod, connection):
        await call(connection, seconds=60.0)
        with pytest.raises(TimeoutError):
            await call(connection, seconds=0.05)
        await call(connection, seconds=0.5)
        begun = asyncio.get_running_loop().time()
        with pytest.raises(TimeoutError):
            await call(connection, seconds=0.7)
        assert asyncio.get_running_loop().time() - begun >= 0.7
        assert pod.connections == 2


async def test_what_is_late_is_never_taken_for_the_next_answer() -> None:
    async with connected(OK[:-1], OK) as (pod, connection):
        with pytest.raises(TimeoutError):
            await call(connection, seconds=0.05)
        assert await call(connection) == Answer(200, b"{}")
        assert pod.connections == 2


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 abc\r\nContent-Length: 2\r\n\r\n{}", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\n\r\n{}", "200 without a length"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -2\r\n\r\n{}", "without a length"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}", "without a length"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9999999999\r\n\r\n{}", "more than 1 MiB"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000, "endless headers"),
    ],
)
async def test_what_is_no_answer_of_ours_is_told_as_such(answer: bytes, said: str) -> None:
    async with connected(answer) as (_, connection):
        with pytest.raises(BadAnswer, match=said):
            await call(connection)


async def test_a_call_that_is_given_up_leaves_nothing_behind() -> None:
    async with connected(OK[:-1], OK) as (pod, connection):
        begun = call(connection)
        await asyncio.sleep(0.05)
        begun.cancel()
        await asyncio.gather(begun, return_exceptions=True)
        assert await call(connection) == Answer(200, b"{}")
        assert pod.connections == 2
