"""The trainer's side of a live transfer, with the agents and the way of the bytes played by the test."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import torch

from sglang_rollout.transfer.link import Link, connect
from sglang_rollout.transfer.live_sender import LiveSender, LiveSending, WrongForEngine
from sglang_rollout.transfer.live_weights import LiveWeights
from sglang_rollout.transfer.reception import Reception
from sglang_rollout.transfer.session import (
    Cancel,
    Contents,
    Hello,
    Joined,
    LinkLost,
    Message,
    Next,
    Payload,
    Ready,
    Refused,
    Sealed,
    Took,
    Welcome,
)
from sglang_rollout.transfer.transports import TransportBroken

TENSORS = {"a": torch.ones(4), "b": torch.zeros(4)}


class Way:
    """One engine's. `hold`: what give() waits for, until abort()."""

    transport = "Test"
    group = "g"

    def __init__(self) -> None:
        self.done: list[str] = []
        self.hold: threading.Event | None = None
        self.ahead: list[int] = []

    def details(self) -> dict[str, str]:
        return {"port": "1"}

    def join(self, seconds: float) -> None:
        self.done.append("join")

    def look_ahead(self, number: int) -> None:
        self.ahead.append(number)

    def prepare(self, number: int) -> tuple[dict[str, str], bytes]:
        return {"sizes": "1"}, b"x"

    def give(self, number: int, seconds: float) -> None:
        self.done.append(f"give {number}")
        if self.hold is not None and not self.hold.wait(seconds):
            raise TransportBroken("not in time")

    def taken(self, number: int) -> None:
        self.done.append(f"taken {number}")

    def abort(self) -> None:
        self.done.append("abort")
        if self.hold is not None:
            self.hold.set()


class Trainer:
    def __init__(self, mode: str = "direct", timeout: float = 20.0) -> None:
        self.reception = Reception()
        self.ways: list[Way] = []
        self.closed: list[bool] = []
        self.hold: threading.Event | None = None
        weights = LiveWeights(TENSORS, 16, lambda size, device: torch.empty(size, dtype=torch.uint8))
        self.manifest = weights.survey()

        def opened(link: Link, hello: Hello) -> Any:
            self.ways.append(Way())
            self.ways[-1].hold = self.hold
            return self.ways[-1]

        def closed(hello: Hello, giving: Any, good: bool) -> None:
            self.closed.append(good)

        self.sender = LiveSender(LiveSending("7", mode, weights, opened, closed, timeout))
        self.links: list[Link] = []
        self.task: asyncio.Task[None] | None = None

    async def open(self) -> Trainer:
        await self.reception.open("127.0.0.1", 0)
        self.task = asyncio.create_task(self.sender.serve(self.reception))
        await asyncio.sleep(0)
        return self

    async def hello(self, receiver: str = "pod-0", mode: str = "direct") -> Link:
        link = await connect("127.0.0.1", self.reception.port, 5.0)
        self.links.append(link)
        await link.send(Hello("m", "7", receiver, mode=mode))
        assert await link.receive(5.0) == Welcome("Test", "g", 1, 2, self.manifest.algorithm, {"port": "1"})
        assert await link.receive(5.0) == Contents(self.manifest.to_json().decode())
        return link

    async def close(self) -> None:
        assert self.task is not None
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        for link in self.links:
            await link.close()
        await self.reception.close()


@pytest_asyncio.fixture
async def trainer() -> AsyncIterator[Trainer]:
    made = await Trainer().open()
    yield made
    await made.close()


async def ask(link: Link, message: Message) -> Message:
    await link.send(message)
    return await link.receive(5.0)


async def to_the_end(link: Link) -> None:
    while True:
        await link.receive(5.0)


async def over(trainer: Trainer, count: int = 1) -> None:
    async with asyncio.timeout(5):
        while len(trainer.closed) < count:  # noqa: ASYNC110 - a list that grows
            await asyncio.sleep(0.01)


async def test_a_conversation_from_hello_to_sealed(trainer: Trainer) -> None:
    link = await trainer.hello()
    assert await ask(link, Ready(-1)) == Ready(-1)
    assert await ask(link, Joined("g")) == Joined("g")
    for number in range(2):
        assert await ask(link, Next(number)) == Payload(number, {"sizes": "1"})
        assert await link.receive(5.0) == Took(number)
    await link.send(Sealed(trainer.manifest.root))
    await over(trainer)
    assert trainer.ways[0].done == ["join", "give 0", "taken 0", "give 1", "taken 1"]
    assert trainer.closed == [True]
    assert trainer.sender.deliveries["pod-0"].reason == ""


async def test_the_first_bucket_is_there_before_an_agent_may_pause_for_it(trainer: Trainer) -> None:
    await trainer.hello()  # up to the contents
    assert trainer.ways[0].ahead == [0]


async def test_what_is_handed_over_is_kept_until_it_was_taken() -> None:
    trainer = await Trainer("colocated").open()
    link = await trainer.hello(mode="colocated")
    assert await ask(link, Next(0)) == Payload(0, {"sizes": "1"})
    assert "taken 0" not in trainer.ways[0].done
    await link.send(Took(0))
    assert await ask(link, Ready(-1)) == Ready(-1)
    assert trainer.ways[0].done[-1] == "taken 0"
    await trainer.close()


@pytest.mark.parametrize("said", [Next(2), Next(-1), Took(0), Joined("another"), Hello("m", "7", "pod-0")])
async def test_what_is_said_out_of_turn_ends_it(trainer: Trainer, said: Message) -> None:
    link = await trainer.hello()
    answer = await ask(link, said)
    assert isinstance(answer, Cancel)
    assert "out of turn" in answer.reason
    await over(trainer)
    assert trainer.sender.deliveries["pod-0"].reason == answer.reason


async def test_one_engine_that_cannot_take_them_ends_it_for_all(trainer: Trainer) -> None:
    first, second = await trainer.hello("pod-0"), await trainer.hello("pod-1")
    await first.send(Refused("tensor b is wrong", lasting=True))
    assert trainer.task is not None
    with pytest.raises(WrongForEngine, match="tensor b is wrong"):
        await asyncio.wait_for(trainer.task, 5)
    assert await second.receive(5.0) == Cancel("the trainer's sender has ended")


async def test_one_that_goes_leaves_the_others(trainer: Trainer) -> None:
    first, second = await trainer.hello("pod-0"), await trainer.hello("pod-1")
    await first.send(Refused("no memory now"))
    await over(trainer)
    assert trainer.sender.deliveries["pod-0"].reason == "no memory now"
    await ask(second, Next(0))
    assert await second.receive(5.0) == Took(0)


async def test_an_agent_that_is_lost_ends_what_waits_for_its_engine(trainer: Trainer) -> None:
    trainer.hold = threading.Event()
    link = await trainer.hello()
    assert isinstance(await ask(link, Next(0)), Payload)
    await link.close()
    await over(trainer)
    assert trainer.closed == [False]
    assert "abort" in trainer.ways[0].done


async def test_the_same_agent_again_takes_the_place_of_its_last_conversation(trainer: Trainer) -> None:
    trainer.hold = threading.Event()
    first = await trainer.hello()
    assert isinstance(await ask(first, Next(0)), Payload)
    trainer.hold = None
    second = await trainer.hello()
    await ask(second, Next(0))
    assert await second.receive(5.0) == Took(0)
    with pytest.raises(LinkLost):
        await to_the_end(first)


async def test_nothing_lasts_longer_than_the_timeout() -> None:
    trainer = await Trainer(timeout=0.5).open()
    link = await trainer.hello()
    answer = await link.receive(5.0)
    assert isinstance(answer, Cancel)
    assert "not in time" in answer.reason
    await trainer.close()


async def test_nothing_of_it_goes_on_when_it_has_ended() -> None:
    before = asyncio.all_tasks()
    trainer = await Trainer().open()
    link = await trainer.hello()
    await asyncio.sleep(0)
    await trainer.close()
    assert asyncio.all_tasks() == before
    assert isinstance(await link.receive(1.0), Cancel)
