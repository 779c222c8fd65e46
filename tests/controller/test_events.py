"""Events: one for each thing that happens, a count instead of repetitions, and never in anybody's way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime

import pytest

from sglang_rollout.controller.events import NOTE_MAX, SERIES_SECONDS, SERIES_WRITE_SECONDS, EventRecorder
from sglang_rollout.controller.kinds import EVENT, Object
from sglang_rollout.controller.kube_errors import Refused
from sglang_rollout.transitions.planned import EventNote
from tests.controller.fake_kube import FakeKube

ROLLOUT: Object = {"metadata": {"name": "fleet", "namespace": "ns", "uid": "u1"}}
NOTE = EventNote("Normal", "WeightsCommitted", "the fleet serves version 2")


@dataclass
class Bench:
    kube: FakeKube
    recorder: EventRecorder
    seconds: float = 0.0

    async def written(self) -> list[Object]:
        await asyncio.wait_for(self.recorder.flush(), 5)
        return [value for (plural, _, _), value in self.kube.objects.items() if plural == EVENT.plural]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    kube = FakeKube()
    made = Bench(
        kube, EventRecorder(kube, "operator-0", lambda: made.seconds, lambda: datetime(2026, 1, 1, tzinfo=UTC))
    )
    task = asyncio.create_task(made.recorder.run())
    yield made
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_an_event_names_what_it_is_about(bench: Bench) -> None:
    bench.recorder.record(ROLLOUT, NOTE)
    (event,) = await bench.written()
    assert event["regarding"] == {
        "apiVersion": "rollout.sglang.io/v1alpha1",
        "kind": "SGLangRollout",
        "namespace": "ns",
        "name": "fleet",
        "uid": "u1",
    }
    assert (event["type"], event["reason"], event["note"]) == ("Normal", NOTE.reason, NOTE.message)
    assert (event["reportingInstance"], event["action"]) == ("operator-0", "Reconcile")


async def test_equal_events_become_a_series_that_is_written_now_and_then(bench: Bench) -> None:
    for _ in range(100):
        bench.recorder.record(ROLLOUT, NOTE)
    (event,) = await bench.written()
    assert event["series"]["count"] == 2
    bench.seconds = SERIES_WRITE_SECONDS
    bench.recorder.record(ROLLOUT, NOTE)
    (event,) = await bench.written()
    assert event["series"]["count"] == 101
    assert len([call for call in bench.kube.calls if call[0] == "merge"]) == 2


async def test_after_a_long_silence_it_is_a_new_event(bench: Bench) -> None:
    bench.recorder.record(ROLLOUT, NOTE)
    bench.seconds = SERIES_SECONDS + 1
    bench.recorder.record(ROLLOUT, NOTE)
    assert len(await bench.written()) == 2


async def test_different_things_are_different_events(bench: Bench) -> None:
    bench.recorder.record(ROLLOUT, NOTE)
    bench.recorder.record(ROLLOUT, EventNote("Normal", NOTE.reason, "the fleet serves version 3"))
    bench.recorder.record({"metadata": {**ROLLOUT["metadata"], "uid": "u2"}}, NOTE)
    assert len(await bench.written()) == 3


async def test_long_notes_are_cut_where_the_api_server_would_refuse_them(bench: Bench) -> None:
    bench.recorder.record(ROLLOUT, EventNote("Warning", "Long", "x" * 5000))
    (event,) = await bench.written()
    assert len(event["note"]) == NOTE_MAX


async def test_what_cannot_be_written_stops_nothing(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.kube.fail = lambda *_: Refused("namespace is being terminated", 403)
    bench.recorder.record(ROLLOUT, NOTE)
    assert await bench.written() == []
    assert "namespace is being terminated" in caplog.text
    bench.kube.fail = lambda *_: None
    bench.recorder.record(ROLLOUT, EventNote("Normal", "Other", "next"))
    assert len(await bench.written()) == 1
