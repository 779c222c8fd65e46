"""Direct and Colocated between a trainer's process and a real engine on CPU: the bytes that arrive, and what is left
when either side goes wrong or away. The agent's part runs in the test itself."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from e2e.sglang_cpu import models
from e2e.sglang_cpu.engine import RunningEngine, engine_command
from sglang_rollout.agent.checkpoint import CheckpointRefused, read_checkpoint
from sglang_rollout.agent.engine_http import EngineError
from sglang_rollout.agent.live_exchange import TransferLost
from sglang_rollout.agent.live_transfer import LiveTransfer
from sglang_rollout.agent.sglang import SGLang
from sglang_rollout.protocol.weights import PauseMode, WeightMove, WeightVersion
from tests.free_ports import free_port

from .trainers import MODES, Trainer

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


class Fleet:
    """One engine, and what the agent would do with it."""

    def __init__(self, engine: RunningEngine, model: str, session: aiohttp.ClientSession, start: str) -> None:
        self.running = engine
        self.engine = SGLang(session, engine.url, "none", "none")
        self.reference = read_checkpoint(models.path(model))
        self.live = LiveTransfer("pod-0")
        self.start = start
        self._trainers: list[Trainer] = []

    async def trainer(self, mode: str, *names: str, **rest: Any) -> Trainer:
        self._trainers.append(Trainer(mode, *names, **rest))
        return await self._trainers[-1].listening()

    async def prepare(self, move: WeightMove) -> str:
        return await self.live.prepare(move, self.reference, self.engine, self.start)

    async def apply(self, move: WeightMove) -> None:
        """Paused as the agent does, and left paused if it fails."""
        await self.engine.pause(PauseMode.RETRACT)
        await self.engine.flush_cache()
        await self.live.check(move)
        await self.live.apply(move, self.engine)
        await self.engine.set_weight_version(move.weights.version)
        await self.engine.continue_generation()

    async def move(self, trainer: Trainer, version: str) -> None:
        move = trainer.move(version)
        await self.prepare(move)
        await self.apply(move)

    async def checksum(self) -> str:
        answer = await self.engine.check_weights("checksum", 60.0)
        assert answer.status == 200
        return str(json.loads(answer.text)["per_engine_checksum"])

    async def from_disk(self, model: str) -> str:
        """The checksum of an engine that has read this checkpoint itself."""
        await self.engine.pause(PauseMode.RETRACT)
        await self.engine.load_from_disk(WeightVersion(model, str(models.path(model))), 60.0)
        await self.engine.continue_generation()
        return await self.checksum()

    async def close(self) -> None:
        await self.live.close()
        for trainer in self._trainers:
            trainer.end()
        self._trainers.clear()


def _engine(folder: Path, model: str, tp: int = 1) -> RunningEngine:
    port = free_port()
    argv, env = engine_command(models.path(model), port, weight_version="start", tp=tp)
    return RunningEngine(argv, env, port, folder / "engine.log")


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.chaos), 2], ids=["tp1", "tp2"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """One that the tests leave serving."""
    with _engine(tmp_path_factory.mktemp("engine"), "qwen3-v1", request.param) as running:
        running.wait_healthy()
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def fleet(engine: RunningEngine) -> AsyncIterator[Fleet]:
    async with aiohttp.ClientSession() as session:
        made = Fleet(engine, "qwen3-v1", session, "s1")
        yield made
        await made.close()


@pytest.mark.parametrize("mode", MODES)
async def test_what_arrives_is_what_was_sent(fleet: Fleet, mode: str) -> None:
    wanted = {name: await fleet.from_disk(name) for name in ("qwen3-v2", "qwen3-v1")}
    assert len(set(wanted.values())) == 2
    trainer = await fleet.trainer(mode, "qwen3-v2", "qwen3-v1", "qwen3-sharded-v2")
    for name in ("qwen3-v2", "qwen3-v1", "qwen3-sharded-v2"):
        await fleet.move(trainer, name)
        assert await fleet.checksum() == wanted[name.replace("sharded-", "")]
        assert (await fleet.engine.model_info()).version == name
        assert await trainer.done() == {"wrong": "", "pod-0": ""}
    await fleet.engine.generate_one(10.0)


async def test_a_group_is_used_again_and_left_for_a_new_trainer_s(fleet: Fleet) -> None:
    first = await fleet.trainer("direct", "qwen3-v2", "qwen3-v1")
    await fleet.move(first, "qwen3-v2")
    kept = dict(fleet.live._groups)
    await first.done()
    await fleet.move(first, "qwen3-v1")
    assert fleet.live._groups == kept
    second = await fleet.trainer("direct", "qwen3-v2")
    await fleet.move(second, "qwen3-v2")
    assert set(fleet.live._groups.values()) > set(kept.values())


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("shape", "k_proj.weight is"),
        ("dtype", "k_proj.weight is"),
        ("missing", "lack model.layers"),
        ("unknown", "hold model.layers.0.extra"),
        ("nan", "Inf or NaN.*k_proj.weight"),
    ],
)
@pytest.mark.parametrize("mode", MODES)
async def test_wrong_weights_are_refused_before_the_engine_hears_of_them(
    fleet: Fleet, mode: str, fault: str, sentence: str
) -> None:
    before = await fleet.checksum()
    trainer = await fleet.trainer(mode, "qwen3-v2", fault=fault)
    with pytest.raises(CheckpointRefused, match=sentence):
        await fleet.prepare(trainer.move("qwen3-v2"))
    assert re.search(sentence, (await trainer.done(by_itself=True))["wrong"])
    assert await fleet.checksum() == before


async def test_nothing_is_touched_without_a_trainer(fleet: Fleet) -> None:
    before = await fleet.checksum()
    trainer = await fleet.trainer("direct", "qwen3-v2")
    with pytest.raises(EngineError, match="is not sent here now"):
        await fleet.prepare(trainer.move("another"))
    move = trainer.move("qwen3-v2")
    await fleet.prepare(move)
    trainer.process.kill()
    trainer.process.wait()
    with pytest.raises(EngineError, match=r"closed the connection|broke"):
        await fleet.live.check(move)
    with pytest.raises(EngineError, match="there is no sender"):
        await fleet.prepare(move)
    assert await fleet.checksum() == before


async def test_weights_that_change_while_they_are_sent_are_no_version(fleet: Fleet) -> None:
    """The first bucket is kept as it was when the weights were looked at."""
    trainer = await fleet.trainer("direct", "qwen3-v2", fault="first changed")
    await fleet.move(trainer, "qwen3-v2")
    assert await fleet.checksum() == await fleet.from_disk("qwen3-v2")
    trainer = await fleet.trainer("direct", "qwen3-v2", fault="last changed")
    move = trainer.move("qwen3-v2")
    await fleet.prepare(move)
    with pytest.raises(EngineError, match="changed while they were being sent"):
        await fleet.apply(move)
    # The engine waits for nobody: it can be given whole weights again.
    again = await fleet.trainer("direct", "qwen3-v2")
    await fleet.move(again, "qwen3-v2")
    assert await fleet.checksum() == await fleet.from_disk("qwen3-v2")


@pytest.mark.parametrize("fault", ["exit@give", "exit@prepare", "hang@prepare"])
async def test_a_trainer_that_is_lost_within_an_apply_is_told_at_once(fleet: Fleet, fault: str) -> None:
    """By gloo, which notices the end of a peer, the engine is free again and takes whole weights of another."""
    trainer = await fleet.trainer("direct", "qwen3-v2", fault=fault)
    move = trainer.move("qwen3-v2", 6.0)
    await fleet.prepare(move)
    began = asyncio.get_running_loop().time()
    with pytest.raises(EngineError):
        await fleet.apply(move)
    assert asyncio.get_running_loop().time() - began < 8
    again = await fleet.trainer("direct", "qwen3-v2")
    await fleet.move(again, "qwen3-v2")
    assert await fleet.checksum() == await fleet.from_disk("qwen3-v2")


@pytest.mark.chaos
@pytest.mark.parametrize("fault", ["exit@join", "hang@give", "stop@give"])
async def test_an_engine_that_waits_for_ever_is_told_to_be_lost(tmp_path: Path, fault: str) -> None:
    with _engine(tmp_path, "qwen3-v1") as running:
        running.wait_healthy()
        async with aiohttp.ClientSession() as session:
            fleet = Fleet(running, "qwen3-v1", session, "s2")
            try:
                trainer = await fleet.trainer("direct", "qwen3-v2", fault=fault)
                move = trainer.move("qwen3-v2", 8.0)
                await fleet.prepare(move)
                began = asyncio.get_running_loop().time()
                with pytest.raises(TransferLost):
                    await fleet.apply(move)
                assert asyncio.get_running_loop().time() - began < 15
            finally:
                await fleet.close()
