"""Brings weights that another agent keeps into the stage here: whole and proven by their digests, or not at all. What
came whole from one peer is kept when the rest must come from the next."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager

import aiohttp

from sglang_rollout.protocol.pod import PATH_STAGE

from .digests import UnknownDigest
from .manifest import MAX_JSON, Manifest, ManifestRefused, root_of
from .outlast import outlast
from .stage import BytesRefused, Stage, StageWriter

IN_FLIGHT = 4
CONNECT_SECONDS = 5.0
SILENCE_SECONDS = 10.0  # of a peer, before the next one is asked


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

        async def worker() -> None:
            for number in waiting:
                await self._one(peer, number)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(IN_FLIGHT):
                    group.create_task(worker())
        except ExceptionGroup as failures:  # except* would wrap what it raises in a group before Python 3.11.4
            of_peer, others = failures.split(_PeerFailed)
            if of_peer is None or others is not None:
                raise
            raise of_peer.exceptions[0] from None

    async def _one(self, peer: _Peer, number: int) -> None:
        filling = self.writer.fill(number)
        view = filling.__enter__()
        try:
            await peer.bucket(number, view)
        except BaseException:
            filling.__exit__(*sys.exc_info())
            raise
        # Shielded: the slot must not be given to somebody else while a thread still reads it.
        checking = asyncio.ensure_future(asyncio.to_thread(filling.__exit__, None, None, None))
        try:
            await asyncio.shield(checking)
        except asyncio.CancelledError:
            await outlast(checking)
            raise
        except (BytesRefused, UnknownDigest) as error:
            raise _PeerFailed(str(error)) from error
        self._done += self._missing.pop(number).size
        self._progress(self._done, self.manifest.size)


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
                await _refusal_of(answer)
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

    async def bucket(self, number: int, into: memoryview) -> None:
        """Raises _PeerFailed when there are more or fewer bytes than fit."""
        filled = 0
        try:
            async with self._get(f"buckets/{number}") as answer:
                await _refusal_of(answer)
                async for piece in answer.content.iter_any():
                    if filled + len(piece) > len(into):
                        raise _PeerFailed(f"bucket {number} has more than its {len(into)} bytes")
                    into[filled : filled + len(piece)] = piece
                    filled += len(piece)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _PeerFailed(f"bucket {number}: {_sentence(error)}") from error
        if filled < len(into):
            raise _PeerFailed(f"bucket {number} ends after {filled} of {len(into)} bytes")

    def _get(self, what: str) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS)
        return self._session.get(f"{self._url}/{what}", headers=self._headers, timeout=limits)


async def _refusal_of(answer: aiohttp.ClientResponse) -> None:
    if answer.status != 200:
        words = (await answer.content.read(1000)).decode(errors="replace")
        raise _PeerFailed(f"it answered {answer.status}: {' '.join(words.split())[:300]}")


def _sentence(error: Exception) -> str:
    return str(error) or type(error).__name__
