"""A trainer's weights on their way into a fleet under load: staged, prepared ahead, direct, colocated, and from disk by
way of the stage. No request fails, two versions never serve at once, and what serves is what was sent."""

from __future__ import annotations

import pytest

from e2e.deployment import answers, examples
from e2e.deployment.connection import Connection
from e2e.deployment.errors import DeploymentError
from e2e.deployment.fleet import Fleet
from e2e.deployment.plugin import Plugin
from e2e.deployment.traffic import Traffic
from e2e.fleet.journal import FIRST, Journal
from e2e.fleet.weights.checksums import checksum
from e2e.fleet.weights.conftest import Load
from e2e.fleet.weights.trainer import Trainer
from sglang_rollout.api import SGLangRollout
from sglang_rollout.api.status import WeightsStatus

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(400)]


async def weights_of(fleet: Fleet) -> WeightsStatus:
    found = (await fleet.read()).status.weights
    assert found is not None
    return found


async def test_a_trainer_generates_converses_and_publishes_between_two_turns(
    fleet: Fleet, trainer: Trainer, journal: Journal
) -> None:
    before = journal.current
    label, _ = journal.next()
    told = await trainer.publish(label, journal.models[label], call="converse")
    assert told.state == "done", told
    turns = told.told["turns"]
    assert [turn["versions"] for turn in turns] == [
        [{"version": version, "begin": 0, "end": 6, "exact": True}] for version in (before, label, label)
    ]
    assert [(len(turn["output_ids"]), turn["finish"]) for turn in turns] == [(6, "length")] * 3


def _held_ahead(rollout: SGLangRollout) -> tuple[str, int]:
    """The version that is staged ahead, and by how many engines."""
    prepared = rollout.status.weights.prepared if rollout.status.weights else None
    return (prepared.version, prepared.engines) if prepared else ("", 0)


def none_failed(seen: Traffic) -> None:
    assert answers.failures(seen.answers) == []


async def test_published_weights_serve_on_all_engines_as_one(
    fleet: Fleet, trainer: Trainer, load: Load, journal: Journal, plugin: Plugin, checksums: dict[str, str]
) -> None:
    starts = [engine.start_id for engine in (await fleet.read()).status.engines]
    for _ in range(2):
        async with load() as seen:
            label, _ = journal.next()
            model = journal.models[label]
            told = await trainer.publish(label, model)
            assert told.state == "done", told
            await seen.more(8, version=label)
        none_failed(seen)
        await fleet.until_serving(label, timeout=30)
        assert await checksum(fleet, plugin) == checksums[model]
        weights = await weights_of(fleet)
        newest = weights.history[-1]
        assert (newest.version, newest.path) == (label, "")
        assert newest.root == told.told["root"] != ""
        assert len(told.told["engines"]) == 2
        print(f"published in {told.seconds:.2f} s, stall {weights.transaction and weights.transaction.stall_seconds}")
    assert [engine.start_id for engine in (await fleet.read()).status.engines] == starts, "an engine restarted"


async def test_engines_generate_while_weights_are_staged(
    fleet: Fleet, trainer: Trainer, load: Load, journal: Journal
) -> None:
    before = journal.current
    async with load() as seen:
        label, _ = journal.next()
        job = await trainer.begin(label, journal.models[label], hold_after=5, bucket_bytes=1 << 16)
        await job.holding()
        staging = await weights_of(fleet)
        assert (staging.phase, staging.version) == ("Staging", before)
        await seen.more(8, version=before)
        await job.go()
        assert (await job.ended()).state == "done"
        await seen.more(4, version=label)
    none_failed(seen)


async def test_weights_that_were_prepared_are_committed_by_a_pause_alone(
    fleet: Fleet, trainer: Trainer, load: Load, journal: Journal, plugin: Plugin, checksums: dict[str, str]
) -> None:
    before = journal.current
    async with load() as seen:
        label, _ = journal.next()
        model = journal.models[label]
        prepared = await trainer.publish(label, model, call="prepare")
        assert prepared.state == "done", prepared
        await fleet.until("both engines to hold it", lambda one: _held_ahead(one) == (label, 2), timeout=20)
        await seen.more(4, version=before)
        committed = await trainer.publish(label, "", call="commit")
        assert committed.state == "done", committed
        await seen.more(4, version=label)
    none_failed(seen)
    await fleet.until_serving(label, timeout=30)
    assert await checksum(fleet, plugin) == checksums[model]


async def test_weights_from_disk_come_by_way_of_the_stage(
    fleet: Fleet, load: Load, journal: Journal, plugin: Plugin, checksums: dict[str, str]
) -> None:
    async with load() as seen:
        label, path = journal.next()
        await fleet.move_weights(label, path)
        await fleet.until_serving(label, timeout=60)
        await seen.more(4, version=label)
    none_failed(seen)
    newest = (await weights_of(fleet)).history[-1]
    assert newest.path == path
    assert newest.root
    assert await checksum(fleet, plugin) == checksums[journal.models[label]]


@pytest.mark.parametrize("transfer", ["Direct", "Colocated"])
async def test_weights_go_straight_into_paused_engines(
    transfer: str,
    fleet: Fleet,
    trainer: Trainer,
    load: Load,
    journal: Journal,
    plugin: Plugin,
    checksums: dict[str, str],
) -> None:
    async with load() as seen:
        label, _ = journal.next()
        model = journal.models[label]
        told = await trainer.publish(label, model, transfer=transfer)
        assert told.state == "done", told
        await seen.more(4, version=label)
    none_failed(seen)
    await fleet.until_serving(label, timeout=30)
    assert await checksum(fleet, plugin) == checksums[model]


async def test_a_fleet_without_a_stage_takes_no_staged_weights(connection: Connection, namespace: str) -> None:
    source = {"type": "Distributed", "distributed": {"senders": [{"address": "10.0.0.7", "port": 29600}]}}
    spec = {"agent": {"staging": {"medium": "None"}}, "weights": {"version": "2", "source": source}}
    manifest = examples.load(examples.QUICKSTART, name="stageless", **spec)
    with pytest.raises(DeploymentError, match=r"agent\.staging\.medium None stages nothing"):
        await Fleet(connection, namespace, "stageless").create(manifest)


async def test_a_label_that_was_served_is_not_given_to_other_bytes(
    fleet: Fleet, trainer: Trainer, journal: Journal
) -> None:
    served = journal.order[-2]
    told = await trainer.publish(served, FIRST)
    assert told.state == "failed", told
    assert f"version {served} already" in told.message
    await fleet.until_serving(journal.current, timeout=30)
