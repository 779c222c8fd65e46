"""Sender and receivers over real connections, with the bytes by a transport in memory: who gets what when agents,
trainer or weights are not as they should be."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from sglang_rollout.transfer.groups import GroupKeeper
from sglang_rollout.transfer.manifest import Manifest, Tensor
from sglang_rollout.transfer.receiver import GroupCache, Receiving, ReceivingFailed, WeightsRefused, receive
from sglang_rollout.transfer.reception import Reception
from sglang_rollout.transfer.sender import SendFailed, Sending, SendReport, send
from sglang_rollout.transfer.session import Announced
from sglang_rollout.transfer.stage import Stage, reserve_host
from sglang_rollout.transfer.transports import TransportBroken

from .fake_transport import Bytes, FakeTransport, one

A, B, C = one("a", b"a" * 100), one("b", b"b" * 200), one("c", b"c" * 300)
REFERENCE = {t.name: t for bucket in (A, B, C) for t in bucket.bucket.tensors}
SLOT = 8192


async def stream(buckets: Sequence[Bytes], pause: float = 0.0) -> AsyncIterator[Bytes]:
    for bucket in buckets:
        await asyncio.sleep(pause)
        yield bucket


class Scene:
    """A trainer and agents on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reception = Reception()
        self.transport = FakeTransport()
        self.keeper = GroupKeeper([self.transport])
        self.stages: dict[str, Stage] = {}
        self.caches: dict[str, GroupCache] = {}

    def stage(self, name: str, size: int = SLOT) -> Stage:
        if name not in self.stages:
            self.stages[name] = reserve_host(self.folder / name, size, 2)
            self.caches[name] = GroupCache()
        return self.stages[name]

    async def trainer(
        self, buckets: Sequence[Bytes], *, timeout: float = 10, join: float = 5, pause: float = 0, **more: Any
    ) -> SendReport:
        sending = Sending("v2", timeout, join, **more)
        return await send(self.reception, self.keeper, sending, stream(buckets, pause))

    async def agent(self, name: str, **order: Any) -> tuple[Manifest, int]:
        words: dict[str, Any] = {
            "transaction": "t1", "version": "v2", "senders": (f"127.0.0.1:{self.reception.port}",), "receiver": name,
            "slot": "a", "members": 2, "reference": REFERENCE, "timeout": 10.0, **order,
        }  # fmt: skip
        return await receive(self.stage(name), [self.transport], self.caches[name], Receiving(**words))

    def bytes_of(self, name: str) -> bytes:
        entry = self.stages[name].slots[0]
        region = self.stages[name].regions(entry)[0]
        with region.look(0, 512 * 2 + 300) as view:
            return bytes(view[:100]) + bytes(view[512:712]) + bytes(view[1024:1324])

    def held(self, name: str) -> list[str]:
        return [slot.sealed.root for slot in Stage(self.folder / name).slots if slot.sealed]


@pytest.fixture(params=[False, True], ids=["collective", "pulled"])
async def scene(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Scene]:
    scene = Scene(tmp_path)
    scene.transport.pulled = request.param
    await scene.reception.open("127.0.0.1", 0)
    for name in ("p0", "p1"):
        scene.stage(name)
    yield scene
    await scene.reception.close()


async def both(*work: Any) -> list[Any]:
    return await asyncio.gather(*(asyncio.wait_for(one, 20) for one in work), return_exceptions=True)


async def test_all_agents_hold_the_same(scene: Scene) -> None:
    done: list[int] = []
    report, first, second = await both(
        scene.trainer([A, B, C]), scene.agent("p0", progress=done.append), scene.agent("p1")
    )
    assert first[0].root == second[0].root == report.root
    assert scene.bytes_of("p0") == scene.bytes_of("p1") == A.data + B.data + C.data
    assert scene.held("p0") == [report.root]
    assert (report.size, report.transaction, [d.reason for d in report.deliveries]) == (600, "t1", ["", ""])
    assert done == [100, 300, 600]


async def test_a_group_is_used_again_until_the_members_change(scene: Scene) -> None:
    for _ in range(2):
        report, *_ = await both(scene.trainer([A, B, C]), scene.agent("p0"), scene.agent("p1"))
        assert isinstance(report, SendReport)
    assert scene.transport.opened == [3]
    await both(scene.trainer([A, B, C]), scene.agent("p0", epoch=1), scene.agent("p1", epoch=1))
    assert scene.transport.opened == [3, 3]
    report, _ = await both(scene.trainer([A, B, C]), scene.agent("p0", members=1))
    assert report.root
    assert scene.transport.opened == [3, 3, 2]


BAD: list[tuple[str, Sequence[Bytes], str]] = [
    ("shape", [A, one("b", b"b" * 8), C], r"b is \[8\] U8, the running model has \[200\] U8"),
    ("dtype", [A, one("b", b"b" * 400, "BF16"), C], r"b is \[200\] BF16, the running model has \[200\] U8"),
    ("unknown", [A, B, C, one("d", b"d")], "hold d, which the running model does not have"),
    ("missing", [A, C], "lack b, which the running model has"),
    ("duplicate", [A, B, A, C], "tensor a was sent twice"),
]


@pytest.mark.parametrize(("buckets", "sentence"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
async def test_wrong_weights_are_refused_by_all(scene: Scene, buckets: Sequence[Bytes], sentence: str) -> None:
    report, *agents = await both(scene.trainer(buckets), scene.agent("p0"), scene.agent("p1"))
    assert isinstance(report, SendFailed)
    assert report.lasting
    assert report.args[0]
    for agent in agents:
        assert isinstance(agent, WeightsRefused)
    with pytest.raises((SendFailed, WeightsRefused), match=sentence):
        raise report
    assert scene.held("p0") == scene.held("p1") == []


async def test_nothing_sent_is_refused(scene: Scene) -> None:
    report, *agents = await both(scene.trainer([]), scene.agent("p0"), scene.agent("p1"))
    assert isinstance(report, SendFailed)
    assert "no tensors" in str(report)
    assert all(isinstance(agent, WeightsRefused) for agent in agents)


@pytest.mark.parametrize("allowed", [False, True])
async def test_values_that_kill_an_engine(scene: Scene, allowed: bool) -> None:
    sick = one("a", struct.pack("<3f", 1.0, float("nan"), float("inf")), "F32")
    order = {"reference": {"a": sick.bucket.tensors[0]}, "members": 1, "allow_nonfinite": allowed}
    report, agent = await both(scene.trainer([sick]), scene.agent("p0", **order))
    if allowed:
        assert agent[1] == report.nonfinite == 2
    else:
        assert isinstance(agent, WeightsRefused)
        assert "Inf or NaN" in str(report)
        assert "a (2)" in str(report)


async def test_a_digest_that_does_not_match_is_no_version(scene: Scene) -> None:
    report, *agents = await both(
        scene.trainer([A, one("b", b"b" * 200, said="0" * 32), C]), scene.agent("p0"), scene.agent("p1")
    )
    assert isinstance(report, SendFailed)
    assert "bucket 1, of tensors b, has digest" in str(report)
    assert all(isinstance(agent, WeightsRefused) for agent in agents)
    assert scene.held("p0") == []


async def test_an_agent_that_is_lost_does_not_stop_the_others(scene: Scene) -> None:
    """It stalls in the middle, then its process ends."""
    stalled = asyncio.Event()
    loop = asyncio.get_running_loop()

    def hurt(rank: int, number: int) -> None:
        if (rank, number) == (2, 1):
            loop.call_soon_threadsafe(stalled.set)
            time.sleep(0.4)
            raise TransportBroken("aborted")

    scene.transport.hurt = hurt
    second = asyncio.create_task(scene.agent("p1"))

    async def kill() -> None:
        await stalled.wait()
        second.cancel()

    report, first, _ = await both(scene.trainer([A, B, C]), scene.agent("p0"), kill())
    assert isinstance(report, SendReport), report
    assert first[0].root == report.root
    assert scene.bytes_of("p0") == A.data + B.data + C.data
    assert {d.receiver: bool(d.reason) for d in report.deliveries} == {"p0": False, "p1": True}
    assert scene.transport.opened == [3, 2]
    assert scene.held("p1") == []


async def test_a_group_that_breaks_with_all_alive_is_made_anew(scene: Scene) -> None:
    broken: list[int] = []

    def hurt(rank: int, number: int) -> None:
        if rank == 1 and number == 1 and not broken:
            broken.append(1)
            time.sleep(0.1)  # the next one is told to come meanwhile, and must not be taken for this one
            raise TransportBroken("a cable was pulled")

    scene.transport.hurt = hurt
    report, first, second = await both(scene.trainer([A, B, C]), scene.agent("p0"), scene.agent("p1"))
    assert first[0].root == second[0].root == report.root
    assert scene.bytes_of("p0") == scene.bytes_of("p1") == A.data + B.data + C.data
    assert scene.transport.opened == [3, 3]


async def test_a_trainer_that_ends_leaves_nothing(scene: Scene) -> None:
    trainer = asyncio.create_task(scene.trainer([A, B, C], pause=0.3))

    async def kill() -> None:
        await asyncio.sleep(0.5)
        trainer.cancel()

    *agents, _ = await both(scene.agent("p0"), scene.agent("p1"), kill())
    for agent in agents:
        assert isinstance(agent, ReceivingFailed)
    assert scene.held("p0") == scene.held("p1") == []


async def test_what_the_trainer_raises_is_told(scene: Scene) -> None:
    async def failing() -> AsyncIterator[Bytes]:
        yield A
        raise ZeroDivisionError("in the gather")

    trainer = send(scene.reception, scene.keeper, Sending("v2", 10, 5), failing())
    result, agent = await both(trainer, scene.agent("p0", members=1))
    assert isinstance(result, ZeroDivisionError)
    assert isinstance(agent, ReceivingFailed)
    assert "ZeroDivisionError: in the gather" in str(agent)


async def test_nobody_waits_longer_than_the_deadline(scene: Scene) -> None:
    begin = time.monotonic()
    report, agent = await both(
        scene.trainer([A, B, C], timeout=1.5, join=9), scene.agent("p0", timeout=1.0)
    )  # the second never comes
    assert isinstance(report, SendFailed)
    assert isinstance(agent, ReceivingFailed)
    assert "within 1 s" in str(agent)
    assert time.monotonic() - begin < 4


async def test_who_does_not_come_is_not_waited_for(scene: Scene) -> None:
    report, first = await both(scene.trainer([A, B, C], join=0.3), scene.agent("p0", timeout=5.0))
    assert report.root == first[0].root
    late = (await both(scene.agent("p1")))[0]
    assert isinstance(late, ReceivingFailed)
    assert "sends nothing" in str(late)


async def test_who_comes_late_is_sent_to_a_peer(scene: Scene) -> None:
    async def late() -> Any:
        await asyncio.sleep(0.6)
        return await scene.agent("p1")

    _, first, second = await both(scene.trainer([A, B, C], join=0.2, pause=0.3), scene.agent("p0"), late())
    assert first[0].root
    assert "too late" in str(second)


async def test_another_transaction_waits_until_the_first_is_given_up(scene: Scene) -> None:
    old = asyncio.create_task(scene.agent("p0", transaction="t0", members=3))

    async def superseded() -> None:
        await asyncio.sleep(0.3)
        old.cancel()

    async def again() -> Any:
        await asyncio.sleep(0.2)
        return await asyncio.gather(scene.agent("p1", transaction="t1", members=1))

    report, _, _ = await both(scene.trainer([A, B, C]), superseded(), again())
    assert report.transaction == "t1"


async def test_several_senders_one_after_the_other(scene: Scene) -> None:
    other, keeper = Reception(), GroupKeeper([scene.transport])
    await other.open("127.0.0.1", 0)
    senders = tuple(f"127.0.0.1:{r.port}" for r in (scene.reception, other))
    first, second, *agents = await both(
        scene.trainer([A, B]),
        send(other, keeper, Sending("v2", 10, 5), stream([C])),
        *(scene.agent(name, senders=senders) for name in ("p0", "p1")),
    )
    assert first.size + second.size == 600
    assert agents[0][0].root == agents[1][0].root == second.root
    assert scene.bytes_of("p1") == A.data + B.data + C.data
    await other.close()


async def test_a_tensor_of_two_senders_is_refused(scene: Scene) -> None:
    other, keeper = Reception(), GroupKeeper([scene.transport])
    await other.open("127.0.0.1", 0)
    senders = tuple(f"127.0.0.1:{r.port}" for r in (scene.reception, other))
    _, second, agent = await both(
        scene.trainer([A, B]),
        send(other, keeper, Sending("v2", 10, 5), stream([B, C])),
        scene.agent("p0", senders=senders, members=1),
    )
    assert "tensor b was sent twice" in str(second)
    assert isinstance(agent, WeightsRefused)
    await other.close()


async def test_the_next_transport_is_tried_when_the_first_does_not_work(scene: Scene) -> None:
    broken = FakeTransport("PeerCopy", works=False)
    scene.keeper = GroupKeeper([broken, scene.transport])

    async def agent(name: str) -> Any:
        order = Receiving("t1", "v2", (f"127.0.0.1:{scene.reception.port}",), name, "a", members=2, timeout=10)
        return await receive(scene.stage(name), [broken, scene.transport], GroupCache(), order)

    report, *agents = await both(scene.trainer([A, B, C]), agent("p0"), agent("p1"))
    assert report.transport == "Gloo"
    assert all(one[0].root == report.root for one in agents)


async def test_no_transport_in_common(scene: Scene) -> None:
    scene.keeper = GroupKeeper([FakeTransport("NCCL")])
    report, agent = await both(scene.trainer([A]), scene.agent("p0", members=1))
    assert "no transport is left between the trainer (NCCL) and its agents (p0: Gloo)" in str(report)
    assert isinstance(agent, ReceivingFailed)
    only = (await both(scene.agent("p0", transport="NCCL")))[0]
    assert "transport NCCL cannot be used by this agent" in str(only)


async def test_a_stage_without_room(scene: Scene) -> None:
    scene.stage("small", 150)
    report, big, small = await both(scene.trainer([A, B, C]), scene.agent("p0"), scene.agent("small"))
    assert report.root == big[0].root
    assert isinstance(small, ReceivingFailed)
    assert "does not fit" in str(small)


async def test_a_sender_whose_end_says_more(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault injection: a sender that loses a bucket on the way to the wire."""
    from sglang_rollout.transfer import sender

    real: Callable[..., Any] = Announced.of

    class Lossy(Announced):
        @classmethod
        def of(cls, number: int, *rest: Any) -> Any:
            return real(number - (number > 1), *rest)

    monkeypatch.setattr(sender, "Announced", Lossy)
    report, agent = await both(scene.trainer([A, B, C]), scene.agent("p0", members=1))
    assert isinstance(report, SendFailed)
    assert isinstance(agent, WeightsRefused)
    assert "announced again as another one" in str(agent)


def test_reference_is_of_these_tensors() -> None:
    assert all(isinstance(tensor, Tensor) for tensor in REFERENCE.values())
