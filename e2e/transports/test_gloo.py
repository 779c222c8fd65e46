"""A trainer's process, two agents' receiving processes, real stages, bytes over Gloo: what each of them holds and how
long anyone waits when one is killed, stands still or sends something wrong."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from e2e.sglang_cpu import environment
from sglang_rollout.transfer.intake import Intake, IntakeFailed, IntakeRefused, Received, TrainerIntake
from sglang_rollout.transfer.manifest import Tensor
from sglang_rollout.transfer.stage import Stage, reserve_host

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]
SLOT = 64 << 20
NAMES = {"bfloat16": "BF16", "float32": "F32", "int64": "I64", "float16": "F16"}
# name, dtype, shape, value: small ones that share buckets, and some that have one for themselves
MODEL: list[list[Any]] = [
    ["embed", "bfloat16", [1000, 512], 0.5],
    ["norm", "float32", [512], 1.5],
    ["large", "bfloat16", [4096, 2048], 0.25],
    *[[f"layer.{n}", "bfloat16", [512, 512], n / 8] for n in range(12)],
    ["count", "int64", [], 7],
]
REFERENCE = {name: Tensor(name, NAMES[dtype], tuple(shape)) for name, dtype, shape, _ in MODEL}
SIZE = sum(tensor.size for tensor in REFERENCE.values())


def python_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT / 'operator'}:{ROOT}", "OMP_NUM_THREADS": "1"}


class Trainer:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.port = 0

    @classmethod
    async def start(cls) -> Trainer:
        process = await asyncio.create_subprocess_exec(
            str(environment.interpreter()), "-m", "e2e.transports.trainer",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=python_environment(),
        )  # fmt: skip
        trainer = cls(process)
        trainer.port = (await trainer.hear("port"))["port"]
        return trainer

    async def hear(self, word: str, value: Any = None) -> dict[str, Any]:
        assert self._process.stdout is not None
        while True:
            line = await asyncio.wait_for(self._process.stdout.readline(), 90)
            assert line, "the trainer died"
            said: dict[str, Any] = json.loads(line)
            if word in said and value in (None, said[word]):
                return said

    async def order(self, **order: Any) -> None:
        """Returns when agents may come."""
        assert self._process.stdin is not None
        words = {"version": "v2", "tensors": MODEL, "bucket_bytes": 1 << 20, "join": 30, "timeout": 60, **order}
        self._process.stdin.write(json.dumps(words).encode() + b"\n")
        await self.hear("expects", words["version"])

    async def done(self) -> dict[str, Any]:
        answer: dict[str, Any] = (await self.hear("done"))["done"]
        return answer

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    async def end(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


@dataclass
class Agent:
    name: str
    folder: Path
    intake: TrainerIntake
    stage: Stage = field(init=False)

    def __post_init__(self) -> None:
        self.stage = reserve_host(self.folder, SLOT, 2)

    @property
    def pid(self) -> int:
        process = self.intake._process
        assert process is not None
        return process.pid

    async def receive(self, trainer: Trainer, **order: Any) -> Received:
        words: dict[str, Any] = {
            "transaction": "t1", "version": "v2", "senders": (f"127.0.0.1:{trainer.port}",), "slot": "a",
            "receiver": self.name, "members": 2, "reference": REFERENCE, "timeout_seconds": 60.0, **order,
        }  # fmt: skip
        return await self.intake.receive(Intake(**words))

    def held(self) -> list[str]:
        return [slot.sealed.root for slot in Stage(self.folder).slots if slot.sealed]


@dataclass
class Scene:
    trainer: Trainer
    agents: list[Agent]

    async def publish(self, order: dict[str, Any] | None = None, **intake: Any) -> list[Any]:
        """What the trainer reports, then each agent."""
        await self.trainer.order(**(order or {}))
        results = await asyncio.gather(
            self.trainer.done(),
            *(agent.receive(self.trainer, **intake) for agent in self.agents),
            return_exceptions=True,
        )
        return list(results)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    folder = Path("/dev/shm") / f"transport-test-{os.getpid()}"
    agents = []
    try:
        for name in ("p0", "p1"):
            intake = TrainerIntake(folder / name, python=str(environment.interpreter()), env=python_environment())
            agents.append(Agent(name, folder / name, intake))
        trainer = await Trainer.start()
        for agent in agents:
            await agent.intake.warm()
        yield Scene(trainer, agents)
        await trainer.end()
    finally:
        for agent in agents:
            await agent.intake.close()
        shutil.rmtree(folder, ignore_errors=True)


async def works_again(scene: Scene) -> None:
    report, *agents = await scene.publish({"version": "v9"}, version="v9", transaction="t9", epoch=9)
    assert "error" not in report, report
    assert [agent.root for agent in agents] == [report["root"]] * len(scene.agents), agents


async def test_all_hold_the_same_and_the_group_is_used_again(scene: Scene) -> None:
    first, *agents = await scene.publish()
    assert [one.root for one in agents if isinstance(one, Received)] == [first.get("root")] * 2, (first, agents)
    assert (first["size"], first["transport"], first["lost"]) == (SIZE, "Gloo", {})
    assert [agent.size for agent in agents] == [SIZE] * 2
    again, *agents = await scene.publish({"version": "v3"}, version="v3", slot="b")
    assert again["root"] == first["root"]
    print("first", first["seconds"], "again", again["seconds"])
    assert again["seconds"] < first["seconds"] + 1
    region = scene.agents[1].stage.regions(scene.agents[1].stage.slots[0])[0]
    with region.look(0, 4) as view:  # of larger items, so "norm" comes first in its bucket
        assert bytes(view) == b"\x00\x00\xc0\x3f"  # 1.5 as float32


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tensors": [["embed", "bfloat16", [1000, 511], 1.0], *MODEL[1:]]}, "embed is [1000, 511] BF16"),
        ({"tensors": [["embed", "float16", [1000, 512], 1.0], *MODEL[1:]]}, "embed is [1000, 512] F16"),
        ({"tensors": MODEL[1:]}, "lack embed"),
        ({"tensors": [*MODEL, ["more", "float32", [3], 1.0]]}, "hold more"),
        ({"tensors": [*MODEL, MODEL[0]]}, "embed is there twice"),
        ({"tensors": []}, "no tensors"),
        ({"tensors": [["embed", "bfloat16", [1000, 512], float("inf")], *MODEL[1:]]}, "embed (512000)"),
        ({"lie_at": 2}, "has digest"),
    ],
    ids=["shape", "dtype", "missing", "unknown", "twice", "nothing", "inf", "digest"],
)
async def test_wrong_weights_are_refused(scene: Scene, change: dict[str, Any], sentence: str) -> None:
    report, *agents = await scene.publish(change)
    assert sentence in report["error"]
    for agent, where in zip(agents, scene.agents, strict=True):
        if sentence == "embed is there twice":  # the trainer itself saw it
            assert isinstance(agent, IntakeRefused | IntakeFailed)
        else:
            assert isinstance(agent, IntakeRefused), agent
        assert sentence in str(agent)
        assert where.held() == []
    await works_again(scene)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_one_agent_is_lost_in_the_middle(scene: Scene, number: signal.Signals) -> None:
    await scene.trainer.order(stall_at=4, stall_seconds=0.5)
    receiving = [asyncio.create_task(agent.receive(scene.trainer)) for agent in scene.agents]
    await scene.trainer.hear("sent", 2)
    pid = scene.agents[1].pid
    os.kill(pid, number)
    begin = time.monotonic()
    report = await scene.trainer.done()
    root = (await receiving[0]).root
    print("gone on after", time.monotonic() - begin)
    assert report["root"] == root
    assert list(report["lost"]) == ["p1"]
    assert time.monotonic() - begin < 25
    if number == signal.SIGSTOP:
        os.kill(pid, signal.SIGCONT)
    with pytest.raises(IntakeFailed):
        await receiving[1]
    assert scene.agents[1].held() == []
    assert scene.agents[0].held() == [root]
    await works_again(scene)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_the_trainer_is_lost_in_the_middle(scene: Scene, number: signal.Signals) -> None:
    await scene.trainer.order(stall_at=4, stall_seconds=2)
    receiving = [asyncio.create_task(agent.receive(scene.trainer)) for agent in scene.agents]
    await scene.trainer.hear("sent", 2)
    begin = time.monotonic()
    scene.trainer.signal(number)
    for one in await asyncio.gather(*receiving, return_exceptions=True):
        assert isinstance(one, IntakeFailed), one
    print("noticed after", time.monotonic() - begin)
    assert time.monotonic() - begin < (2 if number == signal.SIGKILL else 16)
    assert [agent.held() for agent in scene.agents] == [[], []]
    await scene.trainer.end()
    scene.trainer = await Trainer.start()
    await works_again(scene)


async def test_a_trainer_that_takes_too_long(scene: Scene) -> None:
    begin = time.monotonic()
    report, *agents = await scene.publish({"stall_at": 3, "stall_seconds": 6, "timeout": 60}, timeout_seconds=3.0)
    for agent in agents:
        assert isinstance(agent, IntakeFailed)
        assert "within 3 s" in str(agent)
    assert "no agent is left" in report["error"]
    assert time.monotonic() - begin < 12
    await works_again(scene)


async def test_a_receive_that_is_given_up(scene: Scene) -> None:
    await scene.trainer.order(stall_at=4, stall_seconds=1)
    receiving = [asyncio.create_task(agent.receive(scene.trainer)) for agent in scene.agents]
    await scene.trainer.hear("sent", 2)
    begin = time.monotonic()
    for task in receiving:
        task.cancel()
    await asyncio.gather(*receiving, return_exceptions=True)
    assert time.monotonic() - begin < 5
    assert [agent.held() for agent in scene.agents] == [[], []]
    assert "no agent is left" in (await scene.trainer.done())["error"]
    await works_again(scene)
