"""The words between sender and agent, and the connection that carries them: what is malformed, too large, silent or
gone ends in a sentence."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from sglang_rollout.transfer.link import Link, connect, host_port
from sglang_rollout.transfer.manifest import Bucket, ManifestRefused, Tensor
from sglang_rollout.transfer.session import (
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
