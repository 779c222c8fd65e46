"""One sender and the paused engine, bucket by bucket, with neither left standing when the other has gone."""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from sglang_rollout.transfer.link import Link, host_port
from sglang_rollout.transfer.manifest import Manifest
from sglang_rollout.transfer.session import (
    Cancel,
    Joined,
    Message,
    Next,
    Payload,
    Refused,
    SessionError,
    Took,
    Unable,
    Welcome,
)

from .engine_http import EngineError, EngineUnreachable
from .sglang import SGLang, UpdateGroup

log = logging.getLogger(__name__)

GRACE_SECONDS = 5.0  # for the engine to notice that the sender has gone, as gloo does at once


class TransferLost(EngineError):
    """The trainer is gone, or the engine may stand still waiting for it: applying again cannot help, and once it was
    begun only another start of the engine can."""


@dataclass
class Sender:
    """One rank of the trainer, and what it will give. ranks: of the engine, in tensor parallelism."""

    address: str
    link: Link
    ranks: int
    welcome: Welcome
    manifest: Manifest


class Exchange:
    """With one sender, while the engine stands still. `ends_at`: of the loop's clock."""

    def __init__(self, sender: Sender, engine: SGLang, ends_at: float) -> None:
        self.sender = sender
        self.engine = engine
        self._ends_at = ends_at

    def left(self) -> float:
        left = self._ends_at - asyncio.get_running_loop().time()
        if left <= 0:
            raise TransferLost("the time of the move is over")
        return left

    async def leave(self, group: str) -> None:
        """A group that the sender does not know any more."""
        try:
            await self.engine.destroy_update_group(group, self.left())
        except EngineUnreachable as error:
            raise TransferLost(str(error)) from error
        except EngineError as error:
            log.info("group %s: %s", group, error)

    async def join(self) -> None:
        """Sender and engine make their group. Neither waits for the other before both are known to be there."""
        welcome = self.sender.welcome
        host, _ = host_port(self.sender.address)
        group = UpdateGroup(
            welcome.group, host, int(welcome.details["port"]), welcome.rank, welcome.world, welcome.details["backend"]
        )
        await self._say(Joined(welcome.group))
        await self._both(self.engine.init_update_group(group, self.left()), Joined(welcome.group))

    async def receive_all(self) -> None:
        for number, bucket in enumerate(self.sender.manifest.buckets):
            await self._ask(number)
            call = self.engine.update_weights_from_distributed(self.sender.welcome.group, bucket.tensors, self.left())
            await self._both(call, Took(number))

    async def hand_over(self) -> None:
        waited = 0.0
        for number in range(len(self.sender.manifest.buckets)):
            begun = time.monotonic()
            payload, blob = await self._ask(number)
            waited += time.monotonic() - begun
            body = {
                "serialized_named_tensors": _entries(payload, blob, self.sender.ranks),
                "load_format": "flattened_bucket",
                "flush_cache": False,
                "abort_all_requests": False,
            }
            try:
                await self.engine.update_weights_from_tensor(body, self.left())
            except EngineUnreachable as error:
                raise TransferLost(str(error)) from error
            await self._say(Took(number))  # what was lent may be taken back
        log.info("waited %.1f ms for what sender %s gave", waited * 1e3, self.sender.address)

    async def _ask(self, number: int) -> tuple[Payload, bytes]:
        await self._say(Next(number))
        try:
            said, blob = await self.sender.link.receive_blob(self.left())
        except (SessionError, TimeoutError) as error:
            raise self._lost(error) from error
        if not isinstance(said, Payload) or said.number != number:
            raise TransferLost(f"sender {self.sender.address}: {reason_of(said)}")
        return said, blob

    async def _say(self, message: Message) -> None:
        try:
            await self.sender.link.send(message)
        except SessionError as error:
            raise self._lost(error) from error

    async def _both(self, call: Coroutine[Any, Any, None], wanted: Message) -> None:
        """The engine's answer, and the sender's word for the same. Either may stand still for ever when the other has
        gone: the first that fails ends it."""
        answer = asyncio.create_task(call)
        word = asyncio.create_task(self._hear(wanted))
        try:
            await asyncio.wait({answer, word}, return_when=asyncio.FIRST_EXCEPTION)
            if not answer.done():
                await asyncio.wait({answer}, timeout=GRACE_SECONDS)
            if not answer.done():
                raise TransferLost(f"the engine waits for a sender that has gone: {word.exception()}")
            try:
                answer.result()
            except EngineUnreachable as error:
                raise TransferLost(str(error)) from error
            await word
        finally:
            answer.cancel()
            word.cancel()
            await asyncio.gather(answer, word, return_exceptions=True)

    async def _hear(self, wanted: Message) -> None:
        try:
            said = await self.sender.link.receive(self.left())
        except (SessionError, TimeoutError) as error:
            raise self._lost(error) from error
        if said != wanted:
            raise TransferLost(f"sender {self.sender.address}: {reason_of(said)}")

    def _lost(self, error: Exception) -> TransferLost:
        return TransferLost(f"sender {self.sender.address}: {error or 'it said nothing in time'}")


def _entries(payload: Payload, blob: bytes, ranks: int) -> list[str]:
    """One for each rank of tensor parallelism; a single one is for all. Raises TransferLost."""
    try:
        sizes = [int(size) for size in payload.details["sizes"].split(",")]
    except (KeyError, ValueError) as error:
        raise TransferLost(f"the sender's payload has no sizes: {error!r}") from error
    if len(sizes) not in (1, ranks) or sum(sizes) != len(blob):
        raise TransferLost(f"the sender's payload is of {len(sizes)} parts for {ranks} ranks, {len(blob)} bytes")
    entries, begin = [], 0
    for size in sizes:
        entries.append(base64.b64encode(blob[begin : begin + size]).decode())
        begin += size
    return entries if len(sizes) == ranks else entries * ranks


def reason_of(said: Message) -> str:
    """Why somebody said this instead of what was due."""
    return said.reason if isinstance(said, Cancel | Refused | Unable) else f"it said {said.kind} out of turn"
