"""Weights that go from a trainer straight into the paused engine: broadcast to its ranks (Direct), or handed over by a
trainer on the same GPUs (Colocated). Nothing moves before apply(); until then both sides agree on what it will be."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_rollout.protocol.weights import SourceKind, WeightMove
from sglang_rollout.transfer.comparison import differences, some
from sglang_rollout.transfer.digests import ALGORITHMS
from sglang_rollout.transfer.link import connect, host_port
from sglang_rollout.transfer.manifest import Manifest, ManifestRefused
from sglang_rollout.transfer.session import (
    Cancel,
    Contents,
    Hello,
    Message,
    Ready,
    Refused,
    Sealed,
    SessionError,
    Welcome,
)

from .checkpoint import Checkpoint, CheckpointRefused
from .engine_http import EngineError
from .live_exchange import Exchange, Sender, TransferLost, reason_of
from .sglang import SGLang

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 10.0  # of a machine that may be busy; that the connection has ended is heard at once
ARE_YOU_THERE = -1  # no bucket has this number

_MODES = {SourceKind.DIRECT: "direct", SourceKind.COLOCATED: "colocated"}


@dataclass
class _Agreed:
    move_id: str
    start_id: str
    senders: list[Sender]
    root: str


class LiveTransfer:
    """Of one agent: at most one move at a time."""

    def __init__(self, receiver: str) -> None:
        """`receiver`: the pod's name."""
        self._receiver = receiver
        self._agreed: _Agreed | None = None
        self._groups: dict[tuple[str, str], str] = {}  # (start of the engine, sender) -> group that both have joined

    async def prepare(self, move: WeightMove, reference: Checkpoint, engine: SGLang, start_id: str) -> str:
        """Finds the senders and what they will give, and holds it against `reference`. Returns its root. Raises
        CheckpointRefused for what would be wrong at any time, EngineError when it cannot be had now."""
        await self.close()
        self._groups = {key: name for key, name in self._groups.items() if key[0] == start_id}
        info = await engine.server_info()
        senders: list[Sender] = []
        try:
            async with asyncio.timeout(move.timeout_seconds):
                for address in move.source.senders:
                    senders.append(await self._meet(move, address, start_id, info.ranks, info.device))
            whole = _joined([sender.manifest for sender in senders])
            _check(move, whole, reference, senders)
        except BaseException as error:
            for sender in senders:
                with contextlib.suppress(SessionError):
                    reason = str(error) or "the engine's agent has given the move up"
                    await sender.link.send(Refused(reason, lasting=isinstance(error, CheckpointRefused)))
                await sender.link.close()
            if isinstance(error, SessionError | TimeoutError):
                raise EngineError(str(error) or f"no answer within {move.timeout_seconds:g} s") from error
            raise
        self._agreed = _Agreed(move.id, start_id, senders, whole.root)
        return whole.root

    async def check(self, move: WeightMove) -> None:
        """Raises TransferLost if the senders of a prepared move are not there any more: to be asked before apply(),
        when nothing has been touched."""
        for sender in self._of(move).senders:
            try:
                await sender.link.send(Ready(ARE_YOU_THERE))
                said = await sender.link.receive(ANSWER_SECONDS)
            except (SessionError, TimeoutError) as error:
                raise TransferLost(f"sender {sender.address}: {error or 'it does not answer'}") from error
            if said != Ready(ARE_YOU_THERE):
                raise TransferLost(f"sender {sender.address}: {reason_of(said)}")

    async def apply(self, move: WeightMove, engine: SGLang) -> None:
        """The weights into the paused and flushed engine, in one session of its own. Raises EngineError, after which
        any part of them may be in."""
        agreed = self._of(move)
        ends_at = asyncio.get_running_loop().time() + move.timeout_seconds
        done = False
        try:
            await engine.begin_weight_update()
            for sender in agreed.senders:
                exchange = Exchange(sender, engine, ends_at)
                if move.source.kind is SourceKind.COLOCATED:
                    await exchange.hand_over()
                else:
                    await self._broadcast(exchange, agreed.start_id)
            await engine.end_weight_update()
            if engine.release.cheap_fence:
                await engine.fence()  # SGLang has answered for rank 0, and for what it has queued
            done = True
        finally:
            if not done:
                await self.close()
        for sender in agreed.senders:
            with contextlib.suppress(SessionError):  # all of it is in
                await sender.link.send(Sealed(agreed.root))

    async def drop(self, move_id: str) -> None:
        """The move is over, or will not be made."""
        if self._agreed is not None and self._agreed.move_id == move_id:
            await self.close()

    async def close(self) -> None:
        agreed, self._agreed = self._agreed, None
        for sender in agreed.senders if agreed else []:
            await sender.link.close()

    def _of(self, move: WeightMove) -> _Agreed:
        if self._agreed is None or self._agreed.move_id != move.id:
            raise EngineError("there is no agreement with the trainer's senders: prepare again")
        return self._agreed

    async def _meet(self, move: WeightMove, address: str, start_id: str, ranks: int, device: str) -> Sender:
        host, port = host_port(address)
        link = await connect(host, port, CONNECT_SECONDS)
        try:
            kept = self._groups.get((start_id, address))
            await link.send(
                Hello(
                    transaction=move.id,
                    version=move.weights.version,
                    receiver=self._receiver,
                    members=move.source.members,
                    epoch=move.source.epoch,
                    ranks=ranks,
                    mode=_MODES[move.source.kind],
                    offers={"engine": {"device": device, "transport": move.source.transport}},
                    digests=list(ALGORITHMS),
                    groups=[kept] if kept else [],
                )
            )
            welcome = _expect(Welcome, await link.receive(move.timeout_seconds))
            contents = _expect(Contents, await link.receive(move.timeout_seconds))
            return Sender(address, link, ranks, welcome, Manifest.from_json(contents.manifest.encode()))
        except BaseException as error:
            await link.close()
            if isinstance(error, ManifestRefused):
                raise CheckpointRefused(f"sender {address}: {error}") from error
            raise

    async def _broadcast(self, exchange: Exchange, start_id: str) -> None:
        welcome, address = exchange.sender.welcome, exchange.sender.address
        kept = self._groups.pop((start_id, address), "")  # until it is seen to work
        if kept != welcome.group:
            if kept:
                await exchange.leave(kept)
            await exchange.join()
        await exchange.receive_all()
        self._groups[(start_id, address)] = welcome.group


def _joined(manifests: Sequence[Manifest]) -> Manifest:
    """Raises CheckpointRefused."""
    if not manifests:
        raise CheckpointRefused("weights.source names no sender: give the address of the trainer")
    if len(manifests) == 1:
        return manifests[0]
    try:
        return Manifest(
            tuple(bucket for manifest in manifests for bucket in manifest.buckets),
            manifests[0].algorithm,
            {alias: name for manifest in manifests for alias, name in manifest.aliases.items()},
        )
    except ManifestRefused as error:
        raise CheckpointRefused(str(error)) from error


def _check(move: WeightMove, offered: Manifest, running: Checkpoint, senders: Sequence[Sender]) -> None:
    """Raises CheckpointRefused, SessionError."""
    optional = {*running.tied_names, *offered.aliases}
    wrong = differences(offered.tensors, running.by_name, optional=optional, subject="the weights that are sent")
    if wrong:
        raise CheckpointRefused("; ".join(wrong))
    bad = [count for sender in senders if (count := sender.welcome.details.get("nonfinite"))]
    if bad and not move.source.allow_nonfinite:
        raise CheckpointRefused(f"values that are Inf or NaN, of which the engine would die, in tensors {some(bad)}")
    if move.source.root and move.source.root != offered.root:
        raise SessionError(
            f"the trainer offers weights {offered.root[:12]}, and the move is of {move.source.root[:12]}"
        )


def _expect(kind: type[Any], said: Message) -> Any:
    """Raises CheckpointRefused and SessionError for what else was said."""
    if isinstance(said, kind):
        return said
    if isinstance(said, Cancel | Refused) and said.lasting:
        raise CheckpointRefused(said.reason)
    raise SessionError(reason_of(said))
