"""What other agents of the fleet may read here: staged weights, when they catch up, and reports of this pod's ranks.
They show the key that the operator gave to all of them, since they hold no token that another agent would take."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from aiohttp import web

from sglang_rollout.protocol.pod import PATH_STAGE
from sglang_rollout.serving.errors import Forbidden, Refusal
from sglang_rollout.serving.trust import bearer_token
from sglang_rollout.transfer.hook_report import read_reports
from sglang_rollout.transfer.manifest import Manifest
from sglang_rollout.transfer.outlast import outlast
from sglang_rollout.transfer.regions import PIECE, OpenRegion
from sglang_rollout.transfer.stage import Stage
from sglang_rollout.transfer.stage_index import Placement, SlotEntry, StageUnusable, read_index, read_manifest

SEND_SECONDS = 30.0  # for a piece: a reader that takes longer has gone
THREADS = 16  # that send: as many pieces are on their way at once, however many readers there are

log = logging.getLogger(__name__)


class NotStaged(Refusal):
    """These weights are not staged here, or not any more."""

    status = 404


class _CutOff(Exception):
    """The reader does not get the rest; says why."""


@dataclass(frozen=True)
class _Kept:
    """Of one root in one slot: where each bucket lies (region, offset)."""

    slot: SlotEntry
    manifest: Manifest
    places: tuple[tuple[int, int], ...]


class StageDoor:
    """`stage` and `key` are asked at every call: both may come, change and go."""

    def __init__(self, stage: Callable[[], Stage | None], key: Callable[[], str]) -> None:
        self._stage = stage
        self._key = key
        self._threads = ThreadPoolExecutor(THREADS, "stage-door")
        self._kept: _Kept | None = None  # the last one asked for: whoever reads one bucket reads them all

    def serve(self, app: web.Application) -> None:
        app.router.add_get(PATH_STAGE + "/reports/{transaction}/{action}", self._reports)
        app.router.add_get(PATH_STAGE + "/{root}/manifest", self._manifest)
        app.router.add_get(PATH_STAGE + r"/{root}/buckets/{number:\d+}", self._bucket)

    async def _reports(self, request: web.Request) -> web.Response:
        stage = self._open(request)
        words = request.match_info
        reports = await asyncio.to_thread(read_reports, stage.folder, words["transaction"], words["action"])
        return web.json_response([asdict(report) for report in reports])

    async def _manifest(self, request: web.Request) -> web.Response:
        kept = await self._find(self._open(request), request.match_info["root"])
        return web.Response(body=kept.manifest.to_json(), content_type="application/json")

    async def _bucket(self, request: web.Request) -> web.StreamResponse:
        stage = self._open(request)
        root, number = request.match_info["root"], int(request.match_info["number"])
        kept = await self._find(stage, root)
        if number >= len(kept.places):
            raise NotStaged(f"weights {root[:12]} have {len(kept.places)} buckets, there is no number {number}")
        size = kept.manifest.buckets[number].size
        region, begin = kept.places[number]
        bytes_of = stage.regions(kept.slot)[region]
        answer = web.StreamResponse(headers={"Content-Length": str(size)})
        answer.content_type = "application/octet-stream"
        await answer.prepare(request)
        try:
            await self._send(request, bytes_of, begin, size, lambda: _holds(stage, kept.slot, root))
        except _CutOff as error:
            # An answer that only looks whole would be worse.
            log.info("a reader of weights %s was cut off: %s", root[:12], error)
            _cut_off(request)
            return answer
        except BaseException:
            _cut_off(request)
            raise
        await answer.write_eof()
        return answer

    async def _send(
        self, request: web.Request, region: OpenRegion, begin: int, size: int, holds: Callable[[], bool]
    ) -> None:
        """From memory to the connection in threads: orders to this agent wait for nothing of it. Raises _CutOff."""
        transport = request.transport
        if transport is None or transport.get_write_buffer_size():
            raise _CutOff("it does not even take the head of an answer")
        with transport.get_extra_info("socket").dup() as connection:
            connection.settimeout(SEND_SECONDS)

            def send(offset: int) -> None:
                if not holds():
                    raise _CutOff("the slot was given to another version")
                with region.look(begin + offset, min(PIECE, size - offset)) as piece:
                    try:
                        connection.sendall(piece)
                    except OSError as error:
                        raise _CutOff(str(error) or type(error).__name__) from error

            for offset in range(0, size, PIECE):
                sending = asyncio.get_running_loop().run_in_executor(self._threads, send, offset)
                try:
                    await asyncio.shield(sending)
                except asyncio.CancelledError:
                    with contextlib.suppress(OSError):  # it is closed already
                        connection.shutdown(socket.SHUT_RDWR)
                    await outlast(sending)
                    raise

    def _open(self, request: web.Request) -> Stage:
        """Raises Refusal."""
        key = self._key()
        if not key or not hmac.compare_digest(bearer_token(request).encode(), key.encode()):
            raise Forbidden("this is no key of the agents of this fleet")
        stage = self._stage()
        if stage is None:
            raise NotStaged("nothing can be staged here")
        return stage

    async def _find(self, stage: Stage, root: str) -> _Kept:
        """Raises NotStaged."""
        kept = self._kept
        if kept is not None and kept.manifest.root == root and _holds(stage, kept.slot, root):
            return kept
        try:
            self._kept = await asyncio.to_thread(_read, stage, root)
        except StageUnusable as error:
            raise NotStaged(str(error)) from error
        return self._kept


def _read(stage: Stage, root: str) -> _Kept:
    slot = read_index(stage.folder).holding(root)
    manifest = read_manifest(stage.folder, slot)
    placement = Placement(slot.regions)
    return _Kept(slot, manifest, tuple(placement.place(bucket) for bucket in manifest.buckets))


def _holds(stage: Stage, slot: SlotEntry, root: str) -> bool:
    """As the index says now: it is written by other processes, too."""
    try:
        found = read_index(stage.folder).holding(root)
        return (found.name, found.regions) == (slot.name, slot.regions)
    except StageUnusable:
        return False


def _cut_off(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()
