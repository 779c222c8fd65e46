"""What the three pause modes do with requests that run, that are queued, and that come (docs/execution.md)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from e2e.deployment.connection import Connection, core_path
from e2e.deployment.fleet import Fleet
from e2e.deployment.plugin import Plugin
from e2e.deployment.router_client import Request
from e2e.deployment.streams import streams
from e2e.fleet.operations.conftest import RUNNING, WATCHDOG_SECONDS

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(400)]

ENGINES = 2
LONG = Request(tokens=2000)
SHORT = Request(tokens=8)
ON_THE_WAY_SECONDS = 1.0  # for tokens that were made before the pause
STILL_SECONDS = 2.5


@dataclass(frozen=True)
class Case:
    """A pause by `mode`, turned into one by `then` while it lasts, and what becomes of requests that were running.
    retracted: their KV cache is computed again; aborted: they end."""

    mode: str
    then: str = ""
    retracted: bool = False
    aborted: bool = False

    def __str__(self) -> str:
        return f"{self.mode}-{self.then}".rstrip("-")


CASES = (
    Case("Retract", retracted=True),
    Case("InPlace"),
    Case("Abort", aborted=True),
    Case("InPlace", then="Retract", retracted=True),
    Case("InPlace", then="Abort", aborted=True),
    Case("Retract", then="InPlace", retracted=True),
)


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_requests_in_a_pause(case: Case, fleet: Fleet, connection: Connection, plugin: Plugin) -> None:
    running, queued = ENGINES * RUNNING, ENGINES
    early_ones = streams(connection, fleet.namespace, fleet.name, running + queued, LONG)
    late_ones = streams(connection, fleet.namespace, fleet.name, ENGINES, SHORT)
    async with early_ones as early:
        await early.until("tokens", lambda all_: sum(len(one.tokens) > 2 for one in all_) == running)
        for mode in filter(None, (case.mode, case.then)):
            await fleet.patch(execution={"state": "Paused", "pauseMode": mode})
            await fleet.until_ready(timeout=30)
        await asyncio.sleep(ON_THE_WAY_SECONDS)
        assert early.errors == []
        assert [one.finish for one in early.all] == ["abort" if case.aborted else ""] * len(early.all)
        stood = early.counts
        async with late_ones as late:
            await asyncio.sleep(STILL_SECONDS)
            assert early.counts == stood
            assert late.counts == [0] * ENGINES
            assert not any(one.ended for one in late.all)
            said = await plugin("continue", fleet.name)
            assert said.code == 0, said
            await late.until_ended(timeout=60)
            await early.until_ended(timeout=120)
    assert [(one.error, one.finish, len(one.tokens)) for one in late.all] == [("", "length", SHORT.tokens)] * ENGINES
    if not case.aborted:
        wanted = [("", "length", LONG.tokens)] * len(early.all)
        assert [(one.error, one.finish, len(one.tokens)) for one in early.all] == wanted
        had_tokens = [count > 0 for count in stood]
        assert [one.retractions > 0 for one in early.all] == [case.retracted and had for had in had_tokens]


async def test_a_pause_in_place_is_turned_into_retract_before_the_watchdog_ends_the_engine(
    fleet: Fleet, connection: Connection, plugin: Plugin
) -> None:
    starts = [engine.start_id for engine in (await fleet.read()).status.engines]
    async with streams(connection, fleet.namespace, fleet.name, ENGINES * RUNNING, LONG) as early:
        await early.until("tokens", lambda all_: all(len(one.tokens) > 2 for one in all_))
        await fleet.patch(execution={"state": "Paused", "pauseMode": "InPlace"})
        told = await until_told(fleet, "PauseTurnedIntoRetract", timeout=WATCHDOG_SECONDS)
        assert "watchdog" in told
        # Longer than the watchdog allows, counted from the last step.
        await asyncio.sleep(WATCHDOG_SECONDS / 3 + 5)
        assert (await plugin("continue", fleet.name)).code == 0
        await early.until_ended()
    assert [(one.error, one.finish, one.retractions > 0) for one in early.all] == [("", "length", True)] * len(
        early.all
    )
    assert [engine.start_id for engine in (await fleet.read()).status.engines] == starts, "an engine restarted"


async def until_told(fleet: Fleet, reason: str, *, timeout: float) -> str:
    """The note of the fleet's event with this reason."""
    async with asyncio.timeout(timeout):
        while True:
            for event in await fleet.connection.items(core_path(fleet.namespace, "events")):
                if event["reason"] == reason and event["involvedObject"]["name"] == fleet.name:
                    return str(event["message"])
            await asyncio.sleep(0.5)
