"""Leader election: one at a time, terms only grow, and who cannot renew stops before another can begin."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from datetime import UTC, datetime

import pytest

from sglang_rollout.controller.kinds import LEASE
from sglang_rollout.controller.kube_errors import KubeError, Unreachable
from sglang_rollout.controller.lease import (
    HIGHEST_ASKED_TERM,
    LEASE_SECONDS,
    RENEW_SECONDS,
    LeaderLease,
    LeaseLost,
)
from tests.controller.fake_kube import FakeKube, eventually


class Clock:
    """Time that passes only while the election sleeps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        await asyncio.sleep(0)

    def now(self) -> datetime:
        return datetime.fromtimestamp(1_800_000_000 + self.seconds, UTC)


def candidate(kube: FakeKube, clock: Clock, name: str) -> LeaderLease:
    return LeaderLease(kube, "ops", "lease", name, clock=clock, sleep=clock.sleep, now=clock.now)


def spec(kube: FakeKube) -> dict[str, object]:
    found: dict[str, object] = kube.objects["leases", "ops", "lease"]["spec"]
    return found


async def within(step: Awaitable[None]) -> None:
    await asyncio.wait_for(step, 5.0)


async def test_the_first_makes_the_lease_and_leads() -> None:
    kube, clock = FakeKube(), Clock()
    one = candidate(kube, clock, "one")
    assert not one.leading
    await within(one.acquire())
    assert one.leading
    assert one.term == 1
    assert spec(kube)["holderIdentity"] == "one"


async def test_a_standby_waits_until_the_holder_has_been_silent_for_the_whole_duration() -> None:
    kube, clock = FakeKube(), Clock()
    one, two = candidate(kube, clock, "one"), candidate(kube, clock, "two")
    await within(one.acquire())
    clock.seconds = 1000.0  # clocks of machines differ: only the time since `two` first looked counts
    started = clock.seconds
    await within(two.acquire())
    assert clock.seconds - started >= LEASE_SECONDS
    assert two.term == 2
    assert not one.leading


async def test_a_holder_stops_before_the_standby_can_begin() -> None:
    kube, clock = FakeKube(), Clock()
    one = candidate(kube, clock, "one")
    await within(one.acquire())
    kube.fail = lambda *_: Unreachable("cut off")
    with pytest.raises(LeaseLost, match="one no longer holds the lease ops/lease"):
        await within(one.keep())
    assert not one.leading
    assert RENEW_SECONDS <= clock.seconds < LEASE_SECONDS


async def test_not_leading_is_final_even_if_a_late_renewal_succeeds() -> None:
    kube, clock = FakeKube(), Clock()
    one = candidate(kube, clock, "one")
    await within(one.acquire())

    def late(verb: str, *_: str) -> KubeError | None:
        if verb == "replace":
            clock.seconds += RENEW_SECONDS + 1
        return None

    kube.fail = late
    with pytest.raises(LeaseLost):
        await within(one.keep())
    assert not one.leading


async def test_a_holder_whose_lease_was_taken_loses_at_once() -> None:
    kube, clock = FakeKube(), Clock()
    one = candidate(kube, clock, "one")
    await within(one.acquire())
    lease = await kube.get(LEASE, "ops", "lease")
    kube.put(LEASE, {**lease, "spec": {**lease["spec"], "holderIdentity": "two", "leaseTransitions": 2}})
    with pytest.raises(LeaseLost):
        await within(one.keep())
    assert clock.seconds < RENEW_SECONDS


async def test_somebody_else_touching_the_lease_costs_nothing() -> None:
    kube, clock = FakeKube(), Clock()
    one = candidate(kube, clock, "one")
    await within(one.acquire())
    lease = await kube.get(LEASE, "ops", "lease")
    kube.put(LEASE, {**lease, "metadata": {**lease["metadata"], "labels": {"seen": "yes"}}})
    keeping = asyncio.create_task(one.keep())
    await eventually(lambda: clock.seconds > 60)
    assert one.leading
    assert one.term == 1
    keeping.cancel()


async def test_released_it_is_taken_at_once_with_a_higher_term() -> None:
    kube, clock = FakeKube(), Clock()
    one, two = candidate(kube, clock, "one"), candidate(kube, clock, "two")
    await within(one.acquire())
    await within(one.release())
    assert not one.leading
    before = clock.seconds
    await within(two.acquire())
    assert clock.seconds == before
    assert two.term == 2


async def test_an_unreleased_lease_runs_out_by_itself_when_the_release_fails() -> None:
    kube, clock = FakeKube(), Clock()
    one = candidate(kube, clock, "one")
    await within(one.acquire())
    kube.fail = lambda *_: Unreachable("cut off")
    await within(one.release())
    assert not one.leading


async def test_terms_go_above_what_pods_have_obeyed() -> None:
    """The Lease was deleted, or a backup restored: its count begins again, the pods' memory does not."""
    kube, clock = FakeKube(), Clock()
    one = candidate(kube, clock, "one")
    await within(one.acquire())
    keeping = asyncio.create_task(one.keep())
    one.need_term_above(41)
    await eventually(lambda: one.term == 42)
    assert spec(kube)["leaseTransitions"] == 42
    one.need_term_above(7)
    await eventually(lambda: clock.seconds > 20)
    assert one.term == 42
    keeping.cancel()


async def test_no_pod_can_drive_the_term_to_where_no_lease_can_be_written() -> None:
    """Pods run images of tenants; leaseTransitions is an int32."""
    kube, clock = FakeKube(), Clock()
    one = candidate(kube, clock, "one")
    await within(one.acquire())
    keeping = asyncio.create_task(one.keep())
    for lie in (2**62, 2**31 - 1, HIGHEST_ASKED_TERM):
        one.need_term_above(lie)
    await eventually(lambda: clock.seconds > 20)
    assert one.term == 1
    one.need_term_above(HIGHEST_ASKED_TERM - 1)
    await eventually(lambda: one.term == HIGHEST_ASKED_TERM)
    keeping.cancel()


async def test_an_answer_that_never_came_does_not_lock_us_out() -> None:
    kube, clock = FakeKube(), Clock()
    one = candidate(kube, clock, "one")
    lost = True

    def lose_the_answer(verb: str, *_: str) -> KubeError | None:
        nonlocal lost
        if verb == "create" and lost:
            lost = False
            kube.put(
                LEASE,
                {
                    "metadata": {"name": "lease", "namespace": "ops"},
                    "spec": {"holderIdentity": "one", "renewTime": "x", "leaseTransitions": 1},
                },
            )
            return Unreachable("no answer")
        return None

    kube.fail = lose_the_answer
    await within(one.acquire())
    assert clock.seconds < LEASE_SECONDS
    assert one.term == 2
