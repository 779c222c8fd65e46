"""Versions of resources come in from three sides, in any order, and the newest one counts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_rollout.controller import intake as intake_module
from sglang_rollout.controller.intake import Intake
from sglang_rollout.controller.kinds import ROLLOUT, Object
from sglang_rollout.controller.kube_errors import NotFound
from sglang_rollout.controller.metrics import Metrics
from sglang_rollout.controller.rollouts import Rollouts, WentBack
from sglang_rollout.controller.spec_timing import SpecTiming
from sglang_rollout.controller.workqueue import WorkQueue
from tests.controller import fleets
from tests.controller.fake_kube import FakeKube, eventually

KEY = ("ns", "fleet")


def version(number: int, generation: int = 1, status: Any = None, uid: str = "uid-fleet", **spec: Any) -> Object:
    value = fleets.rollout(**spec)
    value["metadata"] |= {"resourceVersion": str(number), "generation": generation, "uid": uid}
    return {**value, "status": status} if status else value


class Bench:
    def __init__(self) -> None:
        self.kube = FakeKube()
        self.rollouts = Rollouts()
        self.queue: WorkQueue[tuple[str, str]] = WorkQueue()
        self.timed: list[tuple[str, float]] = []
        self.seconds = 0.0
        timing = SpecTiming(lambda what, seconds: self.timed.append((what, seconds)), lambda: self.seconds)
        self.metrics = Metrics()
        self.intake = Intake(self.kube, (), self.rollouts, self.queue, self.metrics, timing)

    async def queued(self) -> bool:
        """Whether the fleet waits for a pass; takes it from the queue."""
        if self.queue.depth == 0:
            return False
        item = await self.queue.get()
        assert item is not None
        self.queue.done(item[0])
        return True


@pytest.fixture
async def bench() -> Bench:
    return Bench()


async def test_the_echo_of_an_own_write_is_no_news(bench: Bench) -> None:
    bench.intake.take(version(1))
    assert await bench.queued()
    bench.intake.take(version(5, status={"observedGeneration": 1}))  # as answered to the write
    await bench.queued()
    bench.intake.take_event("MODIFIED", version(5, status={"observedGeneration": 1}))
    assert not await bench.queued()


async def test_a_late_event_does_not_bring_back_an_old_version(bench: Bench) -> None:
    bench.intake.take(version(9, generation=3))
    await bench.queued()
    bench.intake.take_event("MODIFIED", version(7, generation=2))
    assert not await bench.queued()
    known = bench.rollouts.get(KEY)
    assert known is not None
    assert known.generation == 3


async def test_somebody_else_writing_the_status_is_looked_at(bench: Bench) -> None:
    bench.intake.take(version(1))
    await bench.queued()
    bench.intake.take_event("MODIFIED", version(2, status={"observedGeneration": 99}))
    assert await bench.queued()


async def test_a_recreated_resource_is_not_removed_by_the_old_ones_deletion(bench: Bench) -> None:
    bench.intake.take(version(1, uid="old"))
    bench.intake.take(version(8, uid="new"))
    bench.intake.take_event("DELETED", version(5, uid="old"))
    known = bench.rollouts.get(KEY)
    assert known is not None
    assert known.uid == "new"


@given(st.permutations(range(1, 7)))
def test_in_any_order_the_newest_version_stays(order: list[int]) -> None:
    rollouts = Rollouts()
    for number in order:
        rollouts.put(version(number, generation=number))
    known = rollouts.get(KEY)
    assert known is not None
    assert known.generation == 6


async def test_the_time_to_effect_is_told_by_what_was_changed(bench: Bench) -> None:
    bench.intake.take(version(1, execution={"state": "Running"}))
    bench.seconds = 10.0
    bench.intake.take(version(2, generation=2, execution={"state": "Paused"}))
    bench.seconds = 10.5
    bench.intake.take(version(3, 2, fleets.status(ready=True, generation=1).to_object(), execution={"state": "Paused"}))
    assert bench.timed == [], "Ready of an older generation says nothing"
    bench.seconds = 11.0
    bench.intake.take(version(4, 2, fleets.status(ready=True, generation=2).to_object(), execution={"state": "Paused"}))
    assert bench.timed == [("execution", 1.0)]
    bench.intake.take(
        version(5, 2, fleets.status(ready=False, generation=2).to_object(), execution={"state": "Paused"})
    )
    bench.intake.take(version(6, 2, fleets.status(ready=True, generation=2).to_object(), execution={"state": "Paused"}))
    assert len(bench.timed) == 1


async def test_what_the_watch_lost_is_repaired_and_counted(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake_module, "WATCH_LATENESS_SECONDS", 0.01)
    bench.kube.put(ROLLOUT, fleets.rollout())
    bench.kube.put(ROLLOUT, fleets.rollout("other"))
    await bench.intake.first_list()
    bench.kube.put(ROLLOUT, fleets.rollout(replicas=7))
    bench.kube.remove(ROLLOUT, "ns", "other")
    task = asyncio.create_task(bench.intake.resync(0.01))
    await eventually(lambda: bench.intake.missed_in_a_row == 1)
    await eventually(lambda: bench.intake.missed_in_a_row == 0)
    task.cancel()
    known = bench.rollouts.get(KEY)
    assert known is not None
    assert known.model.spec.replicas == 7
    assert bench.rollouts.get(("ns", "other")) is None
    assert bench.metrics.resync_missed._value.get() == 2


async def test_an_api_server_that_went_back_in_time_ends_the_process(bench: Bench) -> None:
    """A backup was restored: versions are counted anew, and everything that is known would seem newer for ever."""
    bench.intake.take(version(500, generation=9))
    bench.kube.put(ROLLOUT, fleets.rollout())
    with pytest.raises(WentBack, match="ns/fleet is older than it was"):
        await bench.intake.first_list()


async def test_without_the_crd_it_waits(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake_module, "RETRY_SECONDS", 0.01)
    missing = [NotFound("no such kind", 404)] * 3
    bench.kube.fail = lambda *_: missing.pop() if missing else None
    bench.kube.put(ROLLOUT, fleets.rollout())
    await asyncio.wait_for(bench.intake.first_list(), 5)
    assert bench.rollouts.get(KEY) is not None
