"""The queue keeps client-go's promises under any order of calls."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_rollout.controller.workqueue import Backoff, Priority, QueueState, WorkQueue

KEYS = st.sampled_from("abc")


class QueueMachine(RuleBasedStateMachine):
    """owed: keys that must be handled again, since something was added after they were last taken."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: QueueState[str] = QueueState(Backoff(random=lambda: 1.0))
        self.now = 0.0
        self.owed: set[str] = set()
        self.later: dict[str, float] = {}
        self.taken: set[str] = set()

    @rule(key=KEYS, priority=st.sampled_from(Priority))
    def add(self, key: str, priority: Priority) -> None:
        self.queue.add(key, priority, self.now)
        self.owed.add(key)

    @rule(key=KEYS, delay=st.floats(0, 10))
    def add_after(self, key: str, delay: float) -> None:
        self.queue.add_after(key, delay, self.now)
        self.later[key] = min(self.later.get(key, float("inf")), self.now + delay)

    @rule(key=KEYS)
    def fail(self, key: str) -> None:
        delay = self.queue.add_failed(key, self.now)
        self.later[key] = min(self.later.get(key, float("inf")), self.now + delay)

    @rule(seconds=st.floats(0, 10))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def take(self) -> None:
        due = {key for key, at in self.later.items() if at <= self.now}
        self.owed |= due
        for key in due:
            del self.later[key]
        item = self.queue.pop(self.now)
        free = self.owed - self.taken
        if item is None:
            assert not free, "a key that is owed was not given out"
            return
        key, since = item
        assert key in free, "given out twice, or without need"
        assert since <= self.now
        self.owed.discard(key)
        self.later.pop(key, None)
        self.taken.add(key)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def done(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.taken)))
        self.taken.discard(key)
        self.queue.done(key)

    @invariant()
    def counts(self) -> None:
        assert self.queue.processing == len(self.taken)
        assert self.queue.depth <= 3


TestQueueMachine = QueueMachine.TestCase


def test_a_new_spec_overtakes_what_only_changed_in_the_cluster() -> None:
    queue: QueueState[str] = QueueState()
    queue.add("old", Priority.STATE, 0.0)
    queue.add("urgent", Priority.STATE, 1.0)
    queue.add("urgent", Priority.SPEC, 2.0)
    assert queue.pop(3.0) == ("urgent", 1.0)
    assert queue.pop(3.0) == ("old", 0.0)
    assert queue.pop(3.0) is None


def test_only_what_was_not_there_wakes_a_worker() -> None:
    """A large fleet tells of a thousand changes while one of them is being handled."""
    queue: QueueState[str] = QueueState()
    assert queue.add("a", Priority.STATE, 0.0)
    assert not queue.add("a", Priority.STATE, 0.0)
    assert not queue.add("a", Priority.SPEC, 0.0)
    assert queue.pop(0.0) == ("a", 0.0)
    assert not queue.add("a", Priority.STATE, 0.0)
    queue.done("a")
    assert queue.pop(0.0) == ("a", 0.0)


def test_a_new_wish_does_not_wait_for_the_backoff() -> None:
    queue: QueueState[str] = QueueState(Backoff(random=lambda: 1.0))
    for _ in range(12):
        queue.add_failed("key", 0.0)
    assert queue.pop(0.04) is None
    queue.forget("key")
    queue.add("key", Priority.SPEC, 0.04)
    assert queue.pop(0.04) == ("key", 0.04)
    assert queue.add_failed("key", 0.05) == pytest.approx(0.05)


@given(st.integers(1, 10_000), st.floats(0, 1))
def test_backoff_stays_in_its_bounds(failures: int, draw: float) -> None:
    assert 0 <= Backoff(first=0.05, longest=60, random=lambda: draw).seconds(failures) <= 60


async def test_many_workers_never_hold_one_key_at_once() -> None:
    queue: WorkQueue[int] = WorkQueue()
    held: set[int] = set()
    handled: list[int] = []

    async def work() -> None:
        while (item := await queue.get()) is not None:
            key = item[0]
            assert key not in held
            held.add(key)
            await asyncio.sleep(0.001)
            held.discard(key)
            handled.append(key)
            queue.done(key)

    workers = [asyncio.create_task(work()) for _ in range(8)]
    for _ in range(20):
        for key in range(4):
            queue.add(key)
        await asyncio.sleep(0.0005)
    queue.add_after(9, 0.01)
    await asyncio.sleep(0.1)
    queue.close()
    await queue.drained()
    await asyncio.gather(*workers)
    assert set(handled) == {0, 1, 2, 3, 9}


async def test_a_failed_key_wakes_a_waiting_worker_in_time() -> None:
    queue: WorkQueue[str] = WorkQueue(Backoff(first=0.01, random=lambda: 1.0))
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.add_failed("key")
    item = await asyncio.wait_for(waiting, 1.0)
    assert item is not None
    assert item[0] == "key"


async def test_a_closed_queue_takes_in_and_gives_out_nothing() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("key")
    queue.close()
    queue.add("other")
    assert await queue.get() is None
