"""Several trainers, one after the other or at once: an engine is given the weights of the one that its order names,
whatever another one has sent or is still sending under the same label."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from sglang_rollout.agent import staging as staging_module
from sglang_rollout.agent.settings import StageSettings
from sglang_rollout.protocol.weights import Source, SourceKind, Step, WeightMove, WeightVersion
from sglang_rollout.transfer.digests import BLAKE2B
from sglang_rollout.transfer.intake import Intake, IntakeFailed, Received
from sglang_rollout.transfer.manifest import plan_buckets
from sglang_rollout.transfer.stage import Stage

from .fake_pod import FakePod, MakePod, eventually

NEW = WeightVersion("5", "")


@dataclass
class Trainer:
    """At its address; all its bytes are `fill`. It sends when `ready`."""

    fill: int
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[str] = field(default_factory=list)
    ended: bool = False  # was told to, and what it writes to is free


class PlayedIntake:
    """In place of TrainerIntake."""

    trainers: dict[str, Trainer] = {}  # noqa: RUF012 - set anew by each test
    warmed: list[Path] = []  # noqa: RUF012

    def __init__(self, folder: Path, **_: Any) -> None:
        self._folder = folder

    async def warm(self) -> None:
        self.warmed.append(self._folder)

    async def receive(self, intake: Intake, progress: Callable[[int, int], None]) -> Received:
        trainer = self.trainers.get(intake.senders[0])
        if trainer is None:
            raise IntakeFailed("there is no sender of a trainer")
        trainer.asked.append(intake.transaction)
        try:
            await trainer.ready.wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0.3)
            trainer.ended = True
            raise
        assert intake.reference is not None
        writer = Stage(self._folder).write(intake.slot, BLAKE2B)
        for bucket in plan_buckets(intake.reference.values(), 4096):
            with writer.fill(writer.place(bucket)) as view:
                view[:] = bytes([trainer.fill]) * bucket.size
        manifest = writer.seal(intake.version)
        return Received(manifest.root, manifest.size, 0)

    async def close(self) -> None:
        pass


@pytest_asyncio.fixture
async def pod(make_pod: MakePod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePod:
    monkeypatch.setattr(staging_module, "TrainerIntake", PlayedIntake)
    PlayedIntake.trainers = {"a:1": Trainer(1), "b:1": Trainer(2)}
    PlayedIntake.warmed = []
    return await _serving(make_pod, tmp_path, 2)


async def _serving(make_pod: MakePod, folder: Path, versions: int) -> FakePod:
    made = await make_pod(stage=StageSettings("Host", versions, 4096, folder / f"stage{versions}"))
    await made.launch()
    await made.serving()
    return made


def source(sender: str) -> Source:
    return Source(SourceKind.STAGED, [sender], members=1)


def staged(sender: str, name: str, until: Step = Step.PREPARE) -> WeightMove:
    return WeightMove(name, NEW, until, source=source(sender))


async def prepared(pod: FakePod, name: str) -> str:
    report = await pod.until(lambda r: r.move is not None and r.move.id == name and r.move.reached is Step.PREPARE)
    assert report.move is not None
    return report.move.root


async def root_of(pod: FakePod, sender: str) -> str:
    """What the trainer's weights are called."""
    await pod.put(pod.desired(move=staged(sender, f"only-{sender}")))
    return await prepared(pod, f"only-{sender}")


async def test_what_receives_is_started_before_the_first_trainer_comes(pod: FakePod, tmp_path: Path) -> None:
    await pod.put(pod.desired())
    await asyncio.sleep(0.2)
    assert PlayedIntake.warmed == [], "there are fleets that no trainer sends to"
    await pod.put(pod.desired(expects_trainer=True))
    await eventually(lambda: bool(PlayedIntake.warmed))
    await asyncio.sleep(0.2)
    assert PlayedIntake.warmed == [tmp_path / "stage2"]


async def test_weights_that_another_trainer_is_sending_are_not_taken_for_the_new_one_s(pod: FakePod) -> None:
    first, second = PlayedIntake.trainers["a:1"], PlayedIntake.trainers["b:1"]
    second.ready.set()
    wanted = await root_of(pod, "b:1")
    await pod.put(pod.desired(move=staged("a:1", "g1.1:5")))
    await eventually(lambda: first.asked == ["g1.1:5"])
    await pod.put(pod.desired(move=staged("b:1", "g2.1:5")))
    await asyncio.sleep(0.1)
    first.ready.set()
    assert await prepared(pod, "g2.1:5") == wanted
    assert second.asked[-1] == "g2.1:5"


async def test_weights_that_another_trainer_has_staged_ahead_are_not_taken_for_the_new_one_s(pod: FakePod) -> None:
    for trainer in PlayedIntake.trainers.values():
        trainer.ready.set()
    wanted = await root_of(pod, "b:1")
    await pod.put(pod.desired(prepare=staged("a:1", "ahead.1:5")))
    await pod.until(lambda r: r.prepare is not None and r.prepare.reached is Step.PREPARE)
    await pod.put(pod.desired(prepare=staged("a:1", "ahead.1:5"), move=staged("b:1", "g2.1:5")))
    assert await prepared(pod, "g2.1:5") == wanted


async def test_what_was_staged_ahead_is_found_by_its_root(pod: FakePod) -> None:
    trainer = PlayedIntake.trainers["a:1"]
    trainer.ready.set()
    await pod.put(pod.desired(prepare=staged("a:1", "ahead.1:5")))
    report = await pod.until(lambda r: r.prepare is not None and r.prepare.reached is Step.PREPARE)
    assert report.prepare is not None
    root = report.prepare.root
    await pod.put(pod.desired(move=WeightMove("g1.1:5", NEW, Step.CONTINUE, source=Source(SourceKind.KEPT, root=root))))
    report = await pod.until(lambda r: r.move is not None and r.move.reached is Step.CONTINUE)
    assert (report.engine.weight_version, report.engine.weights_root) == ("5", root)
    assert trainer.asked == ["ahead.1:5"]


async def test_what_is_found_is_not_relied_on_while_something_may_still_write_over_it(
    pod: FakePod, make_pod: MakePod, tmp_path: Path
) -> None:
    """With room for one version, what is staged ahead would take its place."""
    pod = await _serving(make_pod, tmp_path, 1)
    first, second = PlayedIntake.trainers["a:1"], PlayedIntake.trainers["b:1"]
    second.ready.set()
    root = await root_of(pod, "b:1")
    await pod.put(pod.desired(prepare=WeightMove("ahead", WeightVersion("6", ""), Step.PREPARE, source=source("a:1"))))
    await eventually(lambda: first.asked == ["ahead"])
    await pod.put(pod.desired(move=WeightMove("m", NEW, Step.PREPARE, source=Source(SourceKind.KEPT, root=root))))
    assert await prepared(pod, "m") == root
    assert first.ended
