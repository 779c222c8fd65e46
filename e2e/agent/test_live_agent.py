"""Direct and Colocated by the agent itself, with a real engine on CPU and a trainer's process: what the operator is
told, and that no engine is ever continued with weights that are no version's."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from e2e.sglang_cpu import models
from sglang_rollout.protocol.report import AgentReport, EngineState, MoveReport
from sglang_rollout.protocol.weights import Step, WeightMove, WeightVersion

from .local_pod import LocalPod
from .trainers import MODES, Trainer

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

V1 = WeightVersion("1", str(models.path("qwen3-v1")))


class Rig:
    """A pod that serves, and the operator's and the trainers' side of it."""

    def __init__(self, pod: LocalPod) -> None:
        self.pod = pod
        self.checksums: dict[str, str] = {}
        self._trainers: list[Trainer] = []

    async def trainer(self, mode: str, *names: str, fault: str = "", seconds: float = 60.0) -> Trainer:
        self._trainers.append(Trainer(mode, *names, fault=fault, seconds=seconds))
        return await self._trainers[-1].listening()

    async def until(self, move: WeightMove, step: Step) -> MoveReport:
        """Orders it as far as `step`, and waits until it is there or has ended."""
        await self.pod.put(self.pod.desired(move=replace(move, until=step)))
        report = await self.pod.until(lambda r: r.move is not None and _over(r.move, move.id, step))
        assert report.move is not None
        return report.move

    async def restarted(self, start_id: str) -> AgentReport:
        """The operator has the engine started again, at the version that it boots."""
        await self.pod.put(self.pod.desired(restart_engine=start_id))
        await self.pod.launcher_ended()
        self.pod.start_launcher()
        return await self.pod.until(
            lambda r: r.engine.state is EngineState.SERVING and r.engine.start_id != start_id, 400.0
        )

    def end(self) -> None:
        for trainer in self._trainers:
            trainer.end()
        self._trainers.clear()


def _over(found: MoveReport, move_id: str, step: Step) -> bool:
    return found.id == move_id and (found.reached >= step or bool(found.error) or found.dirty)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    pod = LocalPod(tmp_path_factory.mktemp("pod"), V1)
    pod.start_agent()
    pod.start_launcher()
    made = Rig(pod)
    try:
        await pod.serving()
        made.checksums["qwen3-v1"] = await made.pod.checksum()
        for label in ("qwen3-v2", "qwen3-v1"):  # as an engine has them that reads them from the disk
            move = WeightMove(f"disk-{label}", WeightVersion(label, str(models.path(label))), Step.CONTINUE)
            assert (await made.until(move, Step.CONTINUE)).error == ""
            made.checksums[label] = await made.pod.checksum()
        yield made
    finally:
        made.end()
        await pod.stop()


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def _no_trainers(rig: Rig) -> AsyncIterator[None]:
    yield
    rig.end()


@pytest.mark.parametrize("mode", MODES)
async def test_a_move_comes_from_the_trainer(rig: Rig, mode: str) -> None:
    trainer = await rig.trainer(mode, "qwen3-v2", "qwen3-v1")
    for name in ("qwen3-v2", "qwen3-v1"):
        move = trainer.move(name)
        prepared = await rig.until(move, Step.PREPARE)
        assert prepared.error == ""
        assert len(prepared.root) == 64
        assert not (await rig.pod.report()).engine.paused
        for step in (Step.PAUSE, Step.APPLY, Step.CONTINUE):
            assert (await rig.until(move, step)).error == ""
        report = await rig.pod.report()
        assert report.engine.weight_version == name
        assert report.engine.weights_root == prepared.root
        assert await rig.pod.checksum() == rig.checksums[name]
        answer = await rig.pod.generate(4)
        assert answer["meta_info"]["weight_version"] == name
        assert await trainer.done() == {"wrong": "", "local-0": ""}


@pytest.mark.parametrize("mode", MODES)
async def test_wrong_tensors_never_reach_the_engine(rig: Rig, mode: str) -> None:
    before = (await rig.pod.report()).engine
    trainer = await rig.trainer(mode, "qwen3-v2", fault="shape")
    found = await rig.until(trainer.move("qwen3-v2"), Step.CONTINUE)
    assert found.refused
    assert not found.dirty
    assert "k_proj.weight is" in found.error
    report = await rig.pod.report()
    assert not report.engine.paused
    assert (report.engine.weight_version, report.engine.start_id) == (before.weight_version, before.start_id)
    await rig.pod.generate(2)


async def test_a_trainer_that_ends_before_the_apply_leaves_the_old_weights(rig: Rig) -> None:
    before, checksum = (await rig.pod.report()).engine.weight_version, await rig.pod.checksum()
    trainer = await rig.trainer("direct", "qwen3-v2")
    move = trainer.move("qwen3-v2", 10.0)
    assert (await rig.until(move, Step.PREPARE)).error == ""
    trainer.process.kill()
    trainer.process.wait()
    began = time.monotonic()
    found = await rig.until(move, Step.CONTINUE)
    assert "connection" in found.error
    assert not found.dirty
    assert time.monotonic() - began < 8
    await rig.pod.put(rig.pod.desired())
    report = await rig.pod.until(lambda r: not r.engine.paused)
    assert report.engine.weight_version == before
    assert await rig.pod.checksum() == checksum
    await rig.pod.generate(2)


@pytest.mark.parametrize("fault", ["exit@give", pytest.param("stop@give", marks=pytest.mark.chaos)])
async def test_a_trainer_that_is_lost_within_the_apply_leaves_no_engine_serving(rig: Rig, fault: str) -> None:
    trainer = await rig.trainer("direct", "qwen3-v2", fault=fault)
    before = (await rig.pod.report()).engine
    began = time.monotonic()
    found = await rig.until(trainer.move("qwen3-v2", 10.0), Step.CONTINUE)
    assert found.dirty
    assert time.monotonic() - began < 30
    report = await rig.pod.report()
    assert report.engine.paused
    assert report.engine.start_id == before.start_id
    rig.end()
    again = await rig.restarted(before.start_id)
    assert again.engine.weight_version == V1.version
    assert await rig.pod.checksum() == rig.checksums["qwen3-v1"]
    await rig.pod.generate(2)


async def test_an_agent_that_ends_within_the_apply_knows_afterwards(rig: Rig) -> None:
    """The last one: it leaves the engine to be restarted."""
    trainer = await rig.trainer("direct", "qwen3-v2", fault="hang@give")
    move = trainer.move("qwen3-v2", 20.0)
    assert (await rig.until(move, Step.PAUSE)).error == ""
    await rig.pod.put(rig.pod.desired(move=replace(move, until=Step.CONTINUE)))
    await rig.pod.until(lambda r: "Apply" in r.message)
    await rig.pod.kill_agent()
    trainer.end()
    rig.pod.start_agent()
    report = await rig.pod.until(lambda r: r.move is not None and r.move.dirty)
    assert report.engine.paused
