"""One connection between a trainer's sender and an agent, with a deadline on each wait. Both sides beat, so that a lost
peer is seen soon."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from .session import (
    HEADER,
    MAX_BLOB,
    MAX_JSON,
    Beat,
    LinkLost,
    Message,
    SessionError,
    decode,
    decode_header,
    encode,
)

BEAT_SECONDS = 0.5
SILENCE_SECONDS = 10.0  # one that ends is seen at once; this is for one that stands still, as on a busy machine
LINGER_SECONDS = 0.5  # for the peer to read the last word: closing on unread frames would take it away
WAITING = 64  # frames read ahead; then the peer has to wait
PIECE = 1 << 20  # of a blob, between looks at the clock


class Link:
    """One connection. Beats by itself, and reads ahead, so that a loss is noticed while nobody waits for a frame."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        beat: float = BEAT_SECONDS,
        silence: float = SILENCE_SECONDS,
        largest: tuple[int, int] = (MAX_JSON, MAX_BLOB),
    ) -> None:
        """largest: JSON and blob of a frame that is taken in, in bytes."""
        self._reader = reader
        self._writer = writer
        self._beat = beat
        self._silence = silence
        self._largest = largest
        self._frames: asyncio.Queue[tuple[Message, bytes] | LinkLost] = asyncio.Queue(WAITING)
        self._sending = asyncio.Lock()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._keep_beating())]
        self.lost: LinkLost | None = None  # as soon as it is seen, also while nobody receives
        self.peer = str((writer.get_extra_info("peername") or ("?",))[0])
        self.own = str((writer.get_extra_info("sockname") or ("?",))[0])

    async def send(self, message: Message, blob: bytes | memoryview = b"") -> None:
        """Raises LinkLost."""
        async with self._sending:
            try:
                self._writer.write(encode(message, len(blob)))
                async with asyncio.timeout(self._silence):
                    await self._writer.drain()
                for begin in range(0, len(blob), PIECE):
                    self._writer.write(blob[begin : begin + PIECE])
                    async with asyncio.timeout(self._silence):
                        await self._writer.drain()
            except TimeoutError:
                raise LinkLost(f"{self.peer} takes no more frames") from None
            except (OSError, RuntimeError) as error:
                raise LinkLost(f"the connection to {self.peer} broke: {error}") from error

    async def receive(self, timeout: float) -> Message:
        """The next message; its blob, if any, is dropped. Raises LinkLost, TimeoutError."""
        return (await self.receive_blob(timeout))[0]

    async def receive_blob(self, timeout: float) -> tuple[Message, bytes]:
        async with asyncio.timeout(timeout):  # not wait_for, which may lose a cancellation (Python 3.11)
            frame = await self._frames.get()
        if isinstance(frame, LinkLost):
            self._frames.put_nowait(frame)  # whoever asks next hears it, too
            raise frame
        return frame

    async def close(self) -> None:
        """What was sent still arrives."""
        for task in self._tasks:
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            with contextlib.suppress(OSError, RuntimeError, TimeoutError):
                self._writer.write_eof()
                async with asyncio.timeout(LINGER_SECONDS):
                    while await self._reader.read(PIECE):
                        pass
        finally:  # also when whoever closes it is cancelled meanwhile
            self._writer.close()
        with contextlib.suppress(OSError, RuntimeError, TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                await self._writer.wait_closed()

    async def _read(self) -> None:
        try:
            while True:
                size, blob_size = decode_header(await self._exactly(HEADER.size), self._largest)
                message = decode(await self._exactly(size))
                blob = await self._exactly(blob_size)
                if not isinstance(message, Beat):
                    await self._frames.put((message, blob))
        except TimeoutError:
            self.lost = LinkLost(f"{self.peer} has been silent for {self._silence:g} s")
        except (asyncio.IncompleteReadError, OSError) as error:
            reason = f": {error}" if isinstance(error, OSError) else ""
            self.lost = LinkLost(f"{self.peer} closed the connection{reason}")
        except LinkLost as error:
            self.lost = error
        await self._frames.put(self.lost)

    async def _exactly(self, size: int) -> bytes:
        pieces = []
        for begin in range(0, size, PIECE):
            async with asyncio.timeout(self._silence):
                pieces.append(await self._reader.readexactly(min(PIECE, size - begin)))
        return b"".join(pieces)

    async def _keep_beating(self) -> None:
        with contextlib.suppress(LinkLost):  # whoever reads is told
            while True:
                await asyncio.sleep(self._beat)
                await self.send(Beat())


async def connect(host: str, port: int, timeout: float, **pace: Any) -> Link:
    """The agent's side. Raises LinkLost."""
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    except TimeoutError:
        raise LinkLost(f"the trainer's sender at {host}:{port} does not answer") from None
    except OSError as error:
        raise LinkLost(f"there is no sender of a trainer at {host}:{port}: {error.strerror or error}") from error
    return Link(reader, writer, **pace)


def host_port(address: str) -> tuple[str, int]:
    """Of "host:port", with an IPv6 host in brackets. Raises SessionError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise SessionError(f"{address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)
