"""Brings weights that another agent keeps into the stage here: whole and proven by their digests, or not at all. What
came whole from one peer is kept when the rest must come from the next."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from urllib.parse import SplitResult, urlsplit

import aiohttp

from sglang_rollout.protocol.pod import PATH_STAGE

from .digests import UnknownDigest
from .manifest import MAX_JSON, Manifest, ManifestRefused, root_of
from .outlast import outlast
from .stage import BytesRefused, Stage, StageWriter

IN_FLIGHT = 4
CONNECT_SECONDS = 5.0
SILENCE_SECONDS = 10.0  # of a peer, before the next one is asked
MAX_WORDS = 1000  # bytes of a refusal


class PeersFailed(Exception):
    """No peer gave all of it; says of each why."""


class _PeerFailed(Exception):
    """Of one peer: the next is asked."""


async def pull(
    session: aiohttp.ClientSession,
    peers: Sequence[str],
    root: str,
    version: str,
    key: str,
    stage: Stage,
    slot: str,
    progress: Callable[[int, int], None],
    seconds: float,
) -> Manifest:
    """Fills `slot` of `stage` with the weights `root` and seals them as `version`. `peers` are host:port of agents, the
    nearest first; `key` is AgentDesired.peer_key; `progress` gets bytes that are here and bytes in all. `seconds` is
    for all of it. Raises PeersFailed and StageUnusable; after either, and when cancelled, nothing new is sealed."""
    problems: list[str] = []
    work: _Pull | None = None
    try:
        async with asyncio.timeout(seconds):
            for address in peers:
                peer = _Peer(session, address, root, key)
                try:
                    if work is None:
                        work = _Pull(stage, slot, await peer.manifest(), progress)
                    await work.rest_from(peer)
                    return await work.seal(version, root)
                except _PeerFailed as error:
                    problems.append(f"{address}: {error}")
    except TimeoutError:
        problems.append(f"not within {seconds:g} s")
    raise PeersFailed(f"weights {root[:12]} could not be had from a peer: {'; '.join(problems) or 'there is none'}")


class _Pull:
    """The buckets that are still to come, by their numbers."""

    def __init__(self, stage: Stage, slot: str, manifest: Manifest, progress: Callable[[int, int], None]) -> None:
        self.manifest = manifest
        # What an engine runs or has run: whether it may hold values that are not finite was decided then.
        self.writer: StageWriter = stage.write(slot, manifest.algorithm, allow_nonfinite=True)
        for bucket in manifest.buckets:
            self.writer.place(bucket)
        self._missing = dict(enumerate(manifest.buckets))
        self._progress = progress
        self._done = 0

    async def seal(self, version: str, root: str) -> Manifest:
        sealing = asyncio.ensure_future(
            asyncio.to_thread(self.writer.seal, version, root=root, aliases=self.manifest.aliases)
        )
        try:
            return await asyncio.shield(sealing)
        except asyncio.CancelledError:
            await outlast(sealing)
            raise

    async def rest_from(self, peer: _Peer) -> None:
        """Raises _PeerFailed for the first bucket that does not come as it should; others are ended, too."""
        waiting = iter(list(self._missing))

        async def worker(threads: ThreadPoolExecutor) -> None:
            async with peer.connected() as connection:
                for number in waiting:
                    await self._one(connection, number, threads)

        try:
            with ThreadPoolExecutor(IN_FLIGHT, "peer-pull") as threads:  # idle by the time that their end is awaited
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(IN_FLIGHT, len(self._missing))):
                        group.create_task(worker(threads))
        except ExceptionGroup as failures:  # except* would wrap what it raises in a group before Python 3.11.4
            of_peer, others = failures.split(_PeerFailed)
            if of_peer is None or others is not None:
                raise
            raise of_peer.exceptions[0] from None

    async def _one(self, connection: _Connection, number: int, threads: ThreadPoolExecutor) -> None:
        filling = asyncio.get_running_loop().run_in_executor(threads, self._fill, connection, number)
        try:
            await asyncio.shield(filling)
        except asyncio.CancelledError:
            # The slot must not be given to somebody else while a thread still writes it.
            connection.cut()
            await outlast(filling)
            filling.exception()
            raise
        self._done += self._missing.pop(number).size
        self._progress(self._done, self.manifest.size)

    def _fill(self, connection: _Connection, number: int) -> None:
        """Raises _PeerFailed, StageUnusable."""
        try:
            connection.ask(f"buckets/{number}")
            self.writer.fill_in_order(number, connection.read)
            connection.end()
        except (http.client.HTTPException, OSError) as error:
            raise _PeerFailed(f"bucket {number}: {_sentence(error)}") from error
        except (BytesRefused, UnknownDigest) as error:
            raise _PeerFailed(str(error)) from error
        except _PeerFailed as error:
            raise _PeerFailed(f"bucket {number}: {error}") from error


class _Connection:
    """To one peer. A thread uses it, one bucket after the other; cut() is for any other thread."""

    def __init__(self, connected: socket.socket, url: SplitResult, headers: Mapping[str, str]) -> None:
        self._socket = connected
        self._url = url
        self._headers = dict(headers)
        self._http = http.client.HTTPConnection(url.hostname or "", url.port)
        self._http.auto_open = 0  # connecting anew could not be cut short
        self._http.sock = connected
        self._answer: http.client.HTTPResponse | None = None

    def ask(self, what: str) -> None:
        """Raises _PeerFailed, HTTPException, OSError; as the others do."""
        self._http.request("GET", f"{self._url.path}/{what}", headers=self._headers)
        self._answer = self._http.getresponse()
        if self._answer.status != 200:
            raise _refused(self._answer.status, self._answer.read(MAX_WORDS))

    def read(self, into: memoryview) -> None:
        """What comes next of the answer, as much as there is room."""
        assert self._answer is not None
        filled = 0
        while filled < len(into):
            count = self._answer.readinto(into[filled:])
            if not count:
                raise _PeerFailed("it ends after fewer bytes than it has")
            filled += count

    def end(self) -> None:
        """The answer must have no more."""
        assert self._answer is not None
        if self._answer.read(1):
            raise _PeerFailed("it has more bytes than it should")

    def cut(self) -> None:
        """Whoever waits for it fails at once."""
        with contextlib.suppress(OSError):  # the other side was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._http.close()
        self._socket.close()


class _Peer:
    def __init__(self, session: aiohttp.ClientSession, address: str, root: str, key: str) -> None:
        self._session = session
        self._url = f"http://{address}{PATH_STAGE}/{root}"
        self._root = root
        self._headers: Mapping[str, str] = {"Authorization": f"Bearer {key}"}

    async def manifest(self) -> Manifest:
        """The one whose digest is the root. Raises _PeerFailed."""
        try:
            async with self._get("manifest") as answer:
                if answer.status != 200:
                    raise _refused(answer.status, await answer.content.read(MAX_WORDS))
                data = bytearray()
                async for piece in answer.content.iter_any():
                    data += piece
                    if len(data) > MAX_JSON:
                        raise _PeerFailed(f"its manifest has more than {MAX_JSON} bytes")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _PeerFailed(_sentence(error)) from error
        if root_of(bytes(data)) != self._root:
            raise _PeerFailed(f"its manifest is not that of {self._root[:12]}")
        try:
            return Manifest.from_json(bytes(data))
        except ManifestRefused as error:
            raise _PeerFailed(str(error)) from error

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[_Connection]:
        """Raises _PeerFailed."""
        url = urlsplit(self._url)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                made = await _connect(url.hostname or "", url.port or 80)
        except (TimeoutError, OSError) as error:
            raise _PeerFailed(_sentence(error)) from error
        connection = _Connection(made, url, self._headers)
        try:
            yield connection
        finally:
            connection.close()

    def _get(self, what: str) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS)
        return self._session.get(f"{self._url}/{what}", headers=self._headers, timeout=limits)


async def _connect(host: str, port: int) -> socket.socket:
    """A socket that gives up after SILENCE_SECONDS. Raises OSError."""
    loop = asyncio.get_running_loop()
    problem = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        made = socket.socket(family, kind, protocol)
        try:
            made.setblocking(False)
            await loop.sock_connect(made, address)
            made.settimeout(SILENCE_SECONDS)
            return made
        except OSError as error:
            made.close()
            problem = error
        except BaseException:
            made.close()
            raise
    raise problem


def _refused(status: int, words: bytes) -> _PeerFailed:
    return _PeerFailed(f"it answered {status}: {' '.join(words.decode(errors='replace').split())[:300]}")


def _sentence(error: Exception) -> str:
    return str(error) or type(error).__name__
