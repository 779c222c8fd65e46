"""Weights that must not be served: the trainer is told which tensor is wrong, and the old version serves on."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from e2e.deployment import answers
from e2e.deployment.fleet import Fleet
from e2e.fleet.journal import FIRST, Journal
from e2e.fleet.weights.conftest import Load
from e2e.fleet.weights.trainer import Told, Trainer

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(400)]

SPOILED = "model.layers.0.mlp.up_proj.weight"


@dataclass(frozen=True)
class Case:
    """spoil: of the trainer's tensors; words: in the error."""

    spoil: str
    words: tuple[str, ...]


CASES = (
    Case("shape", (SPOILED, "[256, 128]")),
    Case("dtype", (SPOILED,)),
    Case("missing", (SPOILED,)),
    Case("unknown", (f"{SPOILED}.of_another_model",)),
    Case("duplicate", (SPOILED, "twice")),
    Case("nan", (SPOILED,)),
    Case("inf", (SPOILED,)),
    Case("empty", ("no tensors",)),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.spoil)
async def test_wrong_tensors_are_named_and_serve_nowhere(
    case: Case, fleet: Fleet, trainer: Trainer, load: Load, journal: Journal
) -> None:
    starts = [engine.start_id for engine in (await fleet.read()).status.engines]
    async with load() as seen:
        told = await trainer.publish(f"bad-{case.spoil}", FIRST, spoil=case.spoil)
        print(told)
        assert told.state == "failed", told
        assert [word for word in case.words if word not in told.message] == []
        await seen.more(4, version=journal.current)
    assert answers.failures(seen.answers) == []
    after = (await fleet.read()).status
    assert [engine.start_id for engine in after.engines] == starts, "an engine restarted"
    assert after.routable_replicas == 2
    await restored(fleet, trainer, journal)


async def test_a_second_trainer_is_refused_while_the_first_one_sends(
    fleet: Fleet, trainer: Trainer, load: Load, journal: Journal
) -> None:
    async with load() as seen:
        label, _ = journal.next()
        first = await trainer.begin(label, journal.models[label], hold_after=3)
        await first.holding()
        second = await trainer.publish("second", FIRST)
        assert second.state == "failed", second
        assert label in second.message
        await first.go()
        assert (await first.ended()).state == "done"
        await seen.more(4, version=label)
    assert answers.failures(seen.answers) == []


async def test_a_trainer_that_dies_leaves_the_old_version_serving(
    fleet: Fleet, trainer: Trainer, load: Load, journal: Journal
) -> None:
    async with load() as seen:
        job = await trainer.begin("orphan", FIRST, hold_after=5)
        await job.holding()
        await job.kill()
        assert (await job.ended()).state == "killed"
        await seen.more(8, version=journal.current)
        label = await published(trainer, journal)
        await seen.more(4, version=label)
    assert answers.failures(seen.answers) == []


async def restored(fleet: Fleet, trainer: Trainer, journal: Journal) -> None:
    """A fleet whose spec names refused weights is Ready again when it names others."""
    await published(trainer, journal)
    await fleet.until_serving(journal.current, timeout=60)


async def published(trainer: Trainer, journal: Journal) -> str:
    label, _ = journal.next()
    told: Told = await trainer.publish(label, journal.models[label])
    assert told.state == "done", told
    return label
