"""The words between sender and agent, and the connection that carries them: what is malformed, too large, silent or
gone ends in a sentence."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from sglang_rollout.transfer.link import Link, connect, host_port
from sglang_rollout.transfer.manifest import Bucket, ManifestRefused, Tensor
from sglang_rollout.transfer.reception import Reception
from sglang_rollout.transfer.session import (
    HEADER,
    MAX_JSON,
    Announced,
    Cancel,
    End,
    Hello,
    LinkLost,
    Message,
    Payload,
    SessionError,
    Welcome,
    decode,
    encode,
)

HELLO = Hello("t1", "v2", "pod-0", 2, 7, 2, offers={"Gloo": {"host": "a"}}, digests=["xxh3-128"], groups=["g"])


@asynccontextmanager
async def linked(
    peer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[tuple[str, int]]:
    server = await asyncio.start_server(peer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[:2]


async def answer_of(raw: bytes, *, silence: float = 1.0) -> str:
    """What is said of a peer that sends these bytes and then nothing."""

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)
        await reader.read()
        writer.close()

    async with linked(peer) as (host, port):
        link = await connect(host, port, 1, silence=silence)
        try:
            with pytest.raises(LinkLost) as caught:
                await link.receive(5)
            return str(caught.value)
        finally:
            await link.close()


@pytest.mark.parametrize(
    "message",
    [HELLO, Welcome("Gloo", "g", 1, 3, "xxh3-128", {"port": "1"}), Cancel("no", lasting=True), End("ab", {"a": "b"})],
)
def test_what_is_said_is_heard(message: Message) -> None:
    assert decode(encode(message)[16:]) == message


def test_a_word_of_a_later_release_is_left_out() -> None:
    assert decode(b'{"kind":"ready","number":3,"mood":"good"}').number == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b'{"kind":"nothing"}', b'{"kind":"ready"}', b'{"kind":"ready","number":"3"}', b"\xff",
     b'{"kind":"ready","number":true}', b'{"kind":["ready"],"number":1}', b"[" * 100000],
)  # fmt: skip
def test_malformed_frames_are_refused(body: bytes) -> None:
    with pytest.raises(LinkLost, match="none of ours"):
        decode(body)


async def test_another_protocol_is_told_as_such() -> None:
    assert "speaks something else" in await answer_of(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")


async def test_a_frame_that_is_too_large_is_not_read() -> None:
    assert "more than" in await answer_of(struct.pack(">4sIQ", b"SGR1", MAX_JSON + 1, 0))
    assert "more than" in await answer_of(struct.pack(">4sIQ", b"SGR1", 2, 1 << 60))


async def test_a_silent_peer_is_lost() -> None:
    assert "silent for 0.2 s" in await answer_of(b"", silence=0.2)
    assert "silent for 0.2 s" in await answer_of(encode(HELLO)[:20], silence=0.2)


async def test_a_peer_that_closes_is_lost_at_once_and_stays_lost() -> None:
    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with linked(peer) as (host, port):
        link = await connect(host, port, 1)
        for _ in range(3):
            with pytest.raises(LinkLost, match="closed the connection"):
                await link.receive(1)
        await link.close()


async def test_both_sides_beat_and_blobs_arrive() -> None:
    heard: list[object] = []
    over = asyncio.Event()

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(reader, writer, beat=0.05, silence=0.3)
        heard.append(await link.receive_blob(5))
        await asyncio.sleep(0.6)  # longer than the silence that either bears
        await link.send(Cancel("bye"))
        await over.wait()
        await link.close()

    async with linked(peer) as (host, port):
        link = await connect(host, port, 1, beat=0.05, silence=0.3)
        await link.send(Payload(3), memoryview(b"x" * 5_000_000))
        assert await link.receive(5) == Cancel("bye")
        over.set()
        await link.close()
    assert heard == [(Payload(3), b"x" * 5_000_000)]


async def test_nobody_there() -> None:
    with pytest.raises(LinkLost, match="no sender of a trainer at"):
        await connect("127.0.0.1", 1, 1)


def test_addresses() -> None:
    assert host_port("[::1]:80") == ("::1", 80)
    assert host_port("trainer.ns.svc:5000") == ("trainer.ns.svc", 5000)
    for wrong in ("trainer", "trainer:", ":5", "trainer:http"):
        with pytest.raises(SessionError, match="host:port"):
            host_port(wrong)


def test_a_bucket_travels_in_words() -> None:
    bucket = Bucket((Tensor("a", "BF16", (2, 3)), Tensor("b", "U8", ())), "d")
    assert Announced.of(4, bucket).bucket() == bucket
    for wrong in ([["a", "BF16"]], ["a"], [["a", "X", [1]]], [["a", "U8", [-1]]], [["", "U8", [1]]]):
        with pytest.raises(ManifestRefused):
            Announced(0, wrong, "d").bucket()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("offers", {"Gloo": "none"}),
        ("offers", {"Gloo": {"port": 1}}),
        ("digests", [1]),
        ("groups", [["g"]]),
    ],
)
def test_what_lies_deeper_is_looked_at_as_well(field: str, value: object) -> None:
    body = json.loads(encode(HELLO)[HEADER.size :])
    with pytest.raises(LinkLost, match=field):
        decode(json.dumps({**body, field: value}).encode())


@asynccontextmanager
async def received() -> AsyncIterator[Reception]:
    reception = Reception()
    await reception.open("127.0.0.1", 0)
    try:
        yield reception
    finally:
        await reception.close()


async def test_a_trainer_keeps_no_more_of_a_stranger_than_a_hello_can_have() -> None:
    """Whoever reaches its port can connect."""
    async with received() as reception:
        for sizes in ((100, 1 << 30), (MAX_JSON, 0)):
            _, writer = await asyncio.open_connection("127.0.0.1", reception.port)
            writer.write(struct.pack(">4sIQ", b"SGR1", *sizes))
            sent = 0
            with contextlib.suppress(OSError):
                for _ in range(64):
                    writer.write(b" " * (1 << 16))
                    sent += 1 << 16
                    async with asyncio.timeout(1):
                        await writer.drain()
                    await asyncio.sleep(0.01)
            assert writer.transport.is_closing() or sent < 64 << 16, "it reads on"
            await _end(writer)


async def test_one_host_cannot_take_all_of_a_trainer_s_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_rollout.transfer.reception.UNGREETED_MAX", 3)
    async with received() as reception:
        with reception.expecting("v2", "staged") as arrivals:
            strangers = [await asyncio.open_connection("127.0.0.1", reception.port) for _ in range(6)]
            await asyncio.sleep(0.05)
            ended = [await _is_closed(reader) for reader, _ in strangers]
            assert ended == [False] * 3 + [True] * 3
            for _, writer in strangers:
                await _end(writer)
            await asyncio.sleep(0.05)
            link = await connect("127.0.0.1", reception.port, 1)
            await link.send(HELLO)
            async with asyncio.timeout(2):
                arrived, hello = await arrivals.next()
            assert hello == HELLO
            await arrived.close()
            await link.close()


async def _end(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def _is_closed(reader: asyncio.StreamReader) -> bool:
    """Beats come on a connection that is open."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.1):
            return not await reader.read(1)
    return False
