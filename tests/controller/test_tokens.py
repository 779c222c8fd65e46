"""One token a fleet, minted once, replaced at half of its life or when a pod refuses it."""

from __future__ import annotations

import asyncio

import pytest

from sglang_rollout.controller.kube_errors import Refused, Unreachable
from sglang_rollout.controller.tokens import LIFETIME_SECONDS, FleetTokens
from tests.controller.fake_kube import FakeKube


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


async def test_many_callers_share_one_request() -> None:
    kube = FakeKube()
    tokens = FleetTokens(kube, "ops", "operator", Clock())
    assert set(await asyncio.gather(*(tokens.token("fleet-a") for _ in range(50)))) == {"token-1"}
    assert await tokens.token("fleet-b") == "token-2"
    assert kube.calls == [("create", "serviceaccounts/token", "operator")] * 2


async def test_a_token_is_replaced_at_half_of_its_life() -> None:
    kube, clock = FakeKube(), Clock()
    tokens = FleetTokens(kube, "ops", "operator", clock)
    await tokens.token("a")
    clock.seconds = LIFETIME_SECONDS / 2 - 1
    assert await tokens.token("a") == "token-1"
    clock.seconds = LIFETIME_SECONDS / 2
    assert await tokens.token("a") == "token-2"


async def test_only_the_token_that_was_refused_is_discarded() -> None:
    tokens = FleetTokens(FakeKube(), "ops", "operator", Clock())
    first = await tokens.token("a")
    tokens.discard("a", first)
    second = await tokens.token("a")
    tokens.discard("a", first)  # told late, by a slower call
    assert await tokens.token("a") == second != first


async def test_a_failure_is_told_and_the_next_call_tries_again() -> None:
    kube = FakeKube()
    tokens = FleetTokens(kube, "ops", "operator", Clock())
    kube.fail = lambda *_: Refused("serviceaccounts/token is forbidden", 403)
    with pytest.raises(Refused, match="forbidden"):
        await tokens.token("a")
    kube.fail = lambda *_: None
    assert await tokens.token("a") == "token-1"


async def test_while_half_of_its_life_is_left_an_outage_costs_nothing() -> None:
    kube, clock = FakeKube(), Clock()
    tokens = FleetTokens(kube, "ops", "operator", clock)
    await tokens.token("a")
    kube.fail = lambda *_: Unreachable("down")
    clock.seconds = LIFETIME_SECONDS / 2 + 10
    assert await tokens.token("a") == "token-1"
    clock.seconds = LIFETIME_SECONDS
    with pytest.raises(Unreachable):
        await tokens.token("a")
