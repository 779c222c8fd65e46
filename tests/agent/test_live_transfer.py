"""What the agent does with a trainer's senders and its paused engine, with both played by the test: the order of the
calls, what is refused before the engine hears of it, and that neither side is waited for when the other has gone."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import pytest_asyncio

from sglang_rollout.agent import live_exchange
from sglang_rollout.agent.checkpoint import Checkpoint, CheckpointRefused
from sglang_rollout.agent.engine_http import EngineError, EngineUnreachable
from sglang_rollout.agent.live_exchange import TransferLost
from sglang_rollout.agent.live_transfer import LiveTransfer
from sglang_rollout.agent.sglang import ServerInfo, UpdateGroup
from sglang_rollout.agent.sglang_versions import NEWEST, Release
from sglang_rollout.protocol.weights import Source, SourceKind, Step, WeightMove, WeightVersion
from sglang_rollout.transfer.digests import BLAKE2B
from sglang_rollout.transfer.link import Link
from sglang_rollout.transfer.manifest import Bucket, Manifest, Tensor
from sglang_rollout.transfer.session import (
    Cancel,
    Contents,
    Hello,
    Joined,
    Message,
    Next,
    Payload,
    Ready,
    Sealed,
    Took,
    Unable,
    Welcome,
)

A, B, C = (Tensor(name, "BF16", (2, 2)) for name in "abc")
REFERENCE = Checkpoint([A, B, C], {"tie_word_embeddings": True})
FIRST, SECOND = Manifest((Bucket((A,), "1"), Bucket((B,), "2")), BLAKE2B), Manifest((Bucket((C,), "3"),), BLAKE2B)
WHOLE = Manifest((*FIRST.buckets, *SECOND.buckets), BLAKE2B)


@dataclass
class Engine:
    """Of two ranks. `hangs`: calls that never return; `fails`: calls that are answered with an error."""

    calls: list[str] = field(default_factory=list)
    hangs: set[str] = field(default_factory=set)
    fails: dict[str, EngineError] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    release: Release = NEWEST

    async def fence(self) -> None:
        await self._call("fence")

    async def server_info(self) -> ServerInfo:
        return ServerInfo("0.5.23", 300.0, 2, "cpu")

    async def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.hangs:
            await asyncio.sleep(60)
        if name in self.fails:
            raise self.fails[name]

    async def begin_weight_update(self) -> None:
        await self._call("begin")

    async def end_weight_update(self) -> None:
        await self._call("end")

    async def init_update_group(self, group: UpdateGroup, seconds: float) -> None:
        assert (group.first_rank, group.world, group.backend, group.address) == (1, 3, "gloo", "127.0.0.1")
        await self._call(f"join {group.name}")

    async def destroy_update_group(self, name: str, seconds: float) -> None:
        await self._call(f"leave {name}")

    async def update_weights_from_distributed(self, group: str, tensors: Any, seconds: float) -> None:
        await self._call(f"receive {','.join(tensor.name for tensor in tensors)} by {group}")

    async def update_weights_from_tensor(self, body: dict[str, Any], seconds: float) -> None:
        self.bodies.append(body)
        await self._call("take")


@dataclass
class Sender:
    """One rank of a trainer. `on` a message's kind: said instead of what is due, None: the connection is cut."""

    manifest: Manifest
    group: str = "g1"
    details: dict[str, str] = field(default_factory=dict)
    on: dict[str, Message | None] = field(default_factory=dict)
    heard: list[Message] = field(default_factory=list)
    address: str = ""
    blob: bytes = b"payload"
    payload: dict[str, str] = field(default_factory=lambda: {"sizes": "7"})
    links: list[Link] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def open(self) -> asyncio.Server:
        server = await asyncio.start_server(self._arrive, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    async def _arrive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.links.append(Link(reader, writer))
        self.tasks.append(asyncio.create_task(self._converse(self.links[-1])))

    async def _converse(self, link: Link) -> None:
        while True:
            try:
                said = await link.receive(30.0)
            except Exception:
                break
            self.heard.append(said)
            if said.kind in self.on:
                instead = self.on[said.kind]
                if instead is None:
                    break
                await link.send(instead)
                continue
            match said:
                case Hello():
                    details = {"port": "1", "backend": "gloo", **self.details}
                    await link.send(Welcome("Gloo", self.group, 1, 1 + said.ranks, BLAKE2B, details))
                    await link.send(Contents(self.manifest.to_json().decode()))
                case Joined() | Ready():
                    await link.send(said)
                case Next(number):
                    if self.on_colocated:
                        await link.send(Payload(number, self.payload), self.blob)
                    else:
                        await link.send(Payload(number))
                        await link.send(Took(number))
        await link.close()

    @property
    def on_colocated(self) -> bool:
        return any(isinstance(said, Hello) and said.mode == "colocated" for said in self.heard)


class World:
    def __init__(self) -> None:
        self.engine = Engine()
        self.live = LiveTransfer("pod-0")
        self.senders: list[Sender] = []
        self._servers: list[asyncio.Server] = []

    async def sender(self, manifest: Manifest = WHOLE, **rest: Any) -> Sender:
        made = Sender(manifest, **rest)
        self._servers.append(await made.open())
        self.senders.append(made)
        return made

    def move(self, kind: SourceKind = SourceKind.DIRECT, seconds: float = 10.0, **source: Any) -> WeightMove:
        addresses = [sender.address for sender in self.senders]
        return WeightMove(
            "m1",
            WeightVersion("7", ""),
            Step.APPLY,
            timeout_seconds=seconds,
            source=Source(kind, senders=addresses, members=1, **source),
        )

    async def prepare(self, move: WeightMove, start: str = "s1") -> str:
        return await self.live.prepare(move, REFERENCE, self.engine, start)  # type: ignore[arg-type]

    async def apply(self, move: WeightMove) -> None:
        await self.live.apply(move, self.engine)  # type: ignore[arg-type]

    async def close(self) -> None:
        await self.live.close()
        for sender in self.senders:
            for task in sender.tasks:
                task.cancel()
            await asyncio.gather(*sender.tasks, return_exceptions=True)
            for link in sender.links:
                with contextlib.suppress(asyncio.CancelledError):  # its conversation was ended while it closed it
                    await link.close()
        for server in self._servers:
            server.close()


@pytest_asyncio.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    await made.close()


@pytest.fixture(autouse=True)
def _little_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_exchange, "GRACE_SECONDS", 0.2)


async def test_each_sender_s_group_is_joined_and_its_buckets_received(world: World) -> None:
    await world.sender(FIRST, group="g1")
    await world.sender(SECOND, group="g2")
    move = world.move()
    assert await world.prepare(move) == WHOLE.root
    assert world.engine.calls == []
    await world.live.check(move)
    await world.apply(move)
    assert world.engine.calls == [
        "begin", "join g1", "receive a by g1", "receive b by g1", "join g2", "receive c by g2", "end",
        "fence",
    ]  # fmt: skip
    await _until(lambda: [sender.heard[-1] for sender in world.senders] == [Sealed(WHOLE.root)] * 2)


async def test_what_the_sender_is_told_of_the_engine(world: World) -> None:
    sender = await world.sender()
    await world.prepare(world.move(transport="NCCL", epoch=3))
    hello = sender.heard[0]
    assert isinstance(hello, Hello)
    assert (hello.version, hello.receiver, hello.ranks, hello.epoch, hello.mode) == ("7", "pod-0", 2, 3, "direct")
    assert hello.offers == {"engine": {"device": "cpu", "transport": "NCCL"}}


async def test_a_group_is_used_again_until_engine_or_sender_is_another(world: World) -> None:
    sender = await world.sender()
    for start, group, joins in (("s1", "g1", ["join g1"]), ("s1", "g1", []), ("s1", "g2", ["leave g1", "join g2"])):
        sender.group = group
        world.engine.calls.clear()
        await world.prepare(world.move(), start)
        await world.apply(world.move())
        assert [call for call in world.engine.calls if call.startswith(("join", "leave"))] == joins
    world.engine.calls.clear()
    await world.prepare(world.move(), "s2")
    await world.apply(world.move())
    assert world.engine.calls[1] == "join g2"
    assert [hello.groups for hello in sender.heard if isinstance(hello, Hello)] == [[], ["g1"], ["g1"], []]


async def test_one_payload_is_for_all_ranks_or_each_has_its_own(world: World) -> None:
    sender = await world.sender(blob=b"onetwo", payload={"sizes": "3,3"})
    move = world.move(SourceKind.COLOCATED)
    await world.prepare(move)
    await world.apply(move)
    assert world.engine.calls == ["begin", "take", "take", "take", "end", "fence"]
    entries = [base64.b64encode(part).decode() for part in (b"one", b"two")]
    assert world.engine.bodies[0]["serialized_named_tensors"] == entries
    assert world.engine.bodies[0]["flush_cache"] is False
    await _until(lambda: [said.number for said in sender.heard if isinstance(said, Took)] == [0, 1, 2])
    sender.payload = {"sizes": "6"}
    await world.prepare(move)
    await world.apply(move)
    assert world.engine.bodies[-1]["serialized_named_tensors"] == [base64.b64encode(b"onetwo").decode()] * 2


@pytest.mark.parametrize("payload", [{}, {"sizes": "x"}, {"sizes": "5"}, {"sizes": "2,2,2"}])
async def test_a_payload_that_cannot_be_cut_reaches_no_engine(world: World, payload: dict[str, str]) -> None:
    await world.sender(blob=b"onetwo", payload=payload)
    move = world.move(SourceKind.COLOCATED)
    await world.prepare(move)
    with pytest.raises(TransferLost, match="payload"):
        await world.apply(move)
    assert world.engine.calls == ["begin"]


@pytest.mark.parametrize(
    ("manifest", "sentence"),
    [
        (FIRST, "lack c"),
        (Manifest((*WHOLE.buckets, Bucket((replace(A, name="d"),))), BLAKE2B), "hold d"),
        (Manifest((*FIRST.buckets, Bucket((replace(C, shape=(4,)),))), BLAKE2B), r"c is \[4\] BF16"),
        (Manifest((*FIRST.buckets, Bucket((replace(C, dtype="F16"),))), BLAKE2B), r"c is \[2, 2\] F16"),
    ],
)
async def test_other_tensors_are_refused_and_the_sender_hears_which(
    world: World, manifest: Manifest, sentence: str
) -> None:
    sender = await world.sender(manifest)
    with pytest.raises(CheckpointRefused, match=sentence):
        await world.prepare(world.move())
    await _until(lambda: sender.heard[-1].kind == "refused")
    assert sender.heard[-1].lasting  # type: ignore[attr-defined]
    assert world.engine.calls == []


async def test_the_same_tensor_from_two_senders_is_refused(world: World) -> None:
    await world.sender(WHOLE)
    await world.sender(SECOND)
    with pytest.raises(CheckpointRefused, match="c is there twice"):
        await world.prepare(world.move())


async def test_a_tied_tensor_may_be_sent_or_not(world: World) -> None:
    await world.sender(Manifest((*WHOLE.buckets, Bucket((Tensor("lm_head.weight", "BF16", (2, 2)),))), BLAKE2B))
    assert await world.prepare(world.move())


async def test_values_that_are_not_finite_are_refused_unless_allowed(world: World) -> None:
    await world.sender(details={"nonfinite": "a (3)"})
    with pytest.raises(CheckpointRefused, match=r"Inf or NaN.*a \(3\)"):
        await world.prepare(world.move())
    assert await world.prepare(world.move(allow_nonfinite=True)) == WHOLE.root


async def test_what_cannot_be_had_now_is_no_refusal(world: World) -> None:
    sender = await world.sender(on={"hello": Cancel("not sent here")})
    with pytest.raises(EngineError, match="not sent here"):
        await world.prepare(world.move())
    sender.on = {"hello": Cancel("wrong for good", lasting=True)}
    with pytest.raises(CheckpointRefused, match="wrong for good"):
        await world.prepare(world.move())
    sender.on = {}
    with pytest.raises(EngineError, match="the move is of"):
        await world.prepare(world.move(root="0" * 64))
    with pytest.raises(EngineError, match="no agreement"):
        await world.apply(world.move())
    assert world.engine.calls == []


async def test_a_sender_that_has_gone_is_noticed_before_anything_is_touched(world: World) -> None:
    sender = await world.sender()
    move = world.move()
    await world.prepare(move)
    await sender.links[0].send(Cancel("given up"))
    await asyncio.sleep(0.05)
    with pytest.raises(EngineError, match="given up"):
        await world.live.check(move)
    await world.prepare(move)
    await sender.links[1].close()
    await asyncio.sleep(0.05)
    with pytest.raises(EngineError, match=r"closed the connection|broke"):
        await world.live.check(move)
    await world.prepare(move)
    sender.on = {"ready": Joined("g1")}
    with pytest.raises(EngineError, match="it said joined"):
        await world.live.check(move)


@pytest.mark.parametrize(
    ("on", "hangs", "sentence"),
    [
        ({"joined": None}, "join g1", "closed the connection"),
        ({"joined": Unable("g1", "no route")}, "join g1", "no route"),
        ({"next": None}, "", "closed the connection"),
        ({"next": Cancel("values changed")}, "", "values changed"),
        ({"next": Payload(0)}, "receive b by g1", "it said payload"),
    ],
)
async def test_a_lost_sender_ends_the_apply_though_the_engine_stands_still(
    world: World, on: dict[str, Message | None], hangs: str, sentence: str
) -> None:
    await world.sender(on=on)
    world.engine.hangs = {hangs}
    move = world.move(seconds=3.0)
    await world.prepare(move)
    began = asyncio.get_running_loop().time()
    with pytest.raises(TransferLost, match=sentence if "payload" not in sentence else "."):
        await world.apply(move)
    assert asyncio.get_running_loop().time() - began < 5
    assert "end" not in world.engine.calls
    assert world.live._groups == {}


async def test_an_engine_that_answers_with_an_error_may_be_tried_again(world: World) -> None:
    await world.sender()
    move = world.move()
    world.engine.fails = {"receive b by g1": EngineError("partially updated")}
    await world.prepare(move)
    with pytest.raises(EngineError, match="partially updated") as failed:
        await world.apply(move)
    assert not isinstance(failed.value, TransferLost)
    world.engine.fails = {"receive b by g1": EngineUnreachable("no answer")}
    await world.prepare(move)
    with pytest.raises(TransferLost, match="no answer"):
        await world.apply(move)


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not holds():  # noqa: ASYNC110 - a list that grows
            await asyncio.sleep(0.01)
