"""Releasing memory and taking it back. On CPU the release itself frees nothing, as SGLang does it; that no request is
served meanwhile, the order, the launch flags, and that lost weights are loaded again, are as on a GPU."""

from __future__ import annotations

import asyncio
import time

import pytest

from e2e.cluster import Cluster
from e2e.deployment import answers
from e2e.deployment.connection import Connection
from e2e.deployment.faults import kill_engine
from e2e.deployment.fleet import Fleet
from e2e.deployment.plugin import Plugin
from e2e.deployment.router_client import Request, RouterClient
from e2e.deployment.streams import streams
from e2e.deployment.traffic import traffic
from e2e.fleet.journal import Journal
from e2e.fleet.load import Load
from e2e.fleet.operations.conftest import RUNNING, START_SECONDS
from sglang_rollout.api import ConditionType, SGLangRollout
from sglang_rollout.api.conditions import find_condition

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

ALL = ("weights", "kvCache", "cudaGraph")
FLIPS = 10


def starts(rollout: SGLangRollout) -> list[str]:
    return [engine.start_id for engine in rollout.status.engines]


def ready_reason(rollout: SGLangRollout) -> str:
    found = find_condition(rollout.status.conditions, ConditionType.READY)
    return found.reason if found else ""


async def released(fleet: Fleet, plugin: Plugin) -> SGLangRollout:
    said = await plugin("release", fleet.name, "--pause")
    assert said.code == 0, said
    return await fleet.until_ready(timeout=30)


async def none_is_served(router: RouterClient) -> None:
    tried = await asyncio.gather(*(router.generate(timeout=5) for _ in range(3)))
    assert [one for one in tried if one.ok] == []


async def test_releasing_asks_for_what_it_needs(fleet: Fleet, plugin: Plugin, journal: Journal) -> None:
    running = await plugin("release", fleet.name)
    assert running.code == 1
    assert "kubectl sgrollout release --pause does both" in running.err
    if not (await fleet.object())["spec"]["weights"].get("source"):
        lost = await plugin("release", fleet.name, "--pause")
        assert lost.code == 1
        assert "memory.weightsBackup HostMemory or a weights.source" in lost.err
    label, path = journal.next()
    assert (await plugin("weights", "set", fleet.name, label, "--path", path)).code == 0


async def test_engines_without_the_launch_flags_start_again_in_turn_and_lose_no_request(
    fleet: Fleet, plugin: Plugin, connection: Connection
) -> None:
    before = starts(await fleet.read())
    away: set[int] = set()
    failing: set[str] = set()
    request = Request(tokens=1200)  # longer than it takes to ask, and shorter than what a drain waits for
    async with streams(connection, fleet.namespace, fleet.name, 2 * RUNNING, request) as flying:
        await flying.until("tokens", lambda all_: all(len(one.tokens) > 2 for one in all_))
        releasing = asyncio.create_task(plugin("release", fleet.name, "--pause", timeout=2 * START_SECONDS))
        told = await fleet.until_condition(ConditionType.PROGRESSING, True, "launch flags", timeout=30)
        assert told.reason == "RestartingForMemoryRelease"
        while not releasing.done():
            status = (await fleet.read()).status
            away.add(sum(1 for engine in status.engines if not engine.weight_version and not engine.released))
            degraded = find_condition(status.conditions, ConditionType.DEGRADED)
            if degraded is not None and degraded.status == "True":
                failing.add(degraded.message)
            await asyncio.sleep(0.25)
        said = await releasing
        assert said.code == 0, said
        assert [(one.error, one.finish) for one in flying.all] == [("", "length")] * len(flying.all)
    assert max(away) == 1, "more engines were away at once than maxUnavailable"
    assert failing == set(), "what is ordered is no failure"
    # One that has started under control External has the flags already.
    assert set(starts(await fleet.read())) != set(before)
    said = await plugin("resume", fleet.name, "--continue")
    assert said.code == 0, said


async def test_requests_in_flight_end_and_none_is_served_until_all_is_back(
    fleet: Fleet, plugin: Plugin, router: RouterClient, connection: Connection, journal: Journal
) -> None:
    request = Request(tokens=500)
    async with streams(connection, fleet.namespace, fleet.name, 2 * RUNNING, request) as flying:
        await flying.until("tokens", lambda all_: all(len(one.tokens) > 2 for one in all_))
        rollout = await released(fleet, plugin)
        assert [(one.error, one.finish) for one in flying.all] == [("", "length")] * len(flying.all)
    assert ready_reason(rollout) == "MemoryReleased"
    assert rollout.status.memory is not None
    assert set(rollout.status.memory.to_object().values()) == {"Released"}
    assert {tuple(sorted(engine.released)) for engine in rollout.status.engines} == {tuple(sorted(ALL))}
    assert rollout.status.routable_replicas == 0
    await none_is_served(router)

    # Weights first: they hold nothing before they have been loaded again, and nothing is served before the cache is.
    assert (await plugin("resume", fleet.name, "--weights")).code == 0
    await none_is_served(router)
    half = (await fleet.read()).status.memory
    assert half is not None
    assert half.to_object() == {"weights": "Resident", "kvCache": "Released", "cudaGraph": "Released"}
    said = await plugin("resume", fleet.name, "--continue")
    assert said.code == 0, said
    await fleet.until_ready(timeout=60)
    given = [await router.generate() for _ in range(4)]
    assert answers.versions(given) == {journal.current: 4}


async def test_another_version_comes_while_memory_is_released(
    fleet: Fleet, plugin: Plugin, load: Load, journal: Journal
) -> None:
    await released(fleet, plugin)
    label, path = journal.next()
    said = await plugin("weights", "set", fleet.name, label, "--path", path, "--no-wait")
    assert said.code == 0, said
    began = time.monotonic()
    said = await plugin("resume", fleet.name, "--continue")
    assert said.code == 0, said
    await fleet.until_serving(label, timeout=60)
    async with load() as seen:
        await seen.more(4)
    assert answers.versions(seen.since(began)).keys() == {label}


async def test_an_engine_that_dies_while_released_is_released_again(
    fleet: Fleet, plugin: Plugin, router: RouterClient, cluster: Cluster
) -> None:
    before = await released(fleet, plugin)
    await asyncio.to_thread(kill_engine, cluster, await fleet.pod(0))

    def again(rollout: SGLangRollout) -> bool:
        first = rollout.status.engines[0]
        return first.start_id not in ("", starts(before)[0]) and set(first.released) == set(ALL)

    async with traffic(router) as seen:
        await fleet.until("the release of the new engine process", again, timeout=START_SECONDS)
        await fleet.until_ready(timeout=30)
    assert [one for one in seen.answers if one.ok] == []
    said = await plugin("resume", fleet.name, "--continue")
    assert said.code == 0, said


async def test_memory_flipped_many_times_ends_as_asked_last(fleet: Fleet, load: Load, plugin: Plugin) -> None:
    before = starts(await fleet.read())
    for flip in range(FLIPS):
        state, residency = ("Paused", "Released") if flip % 2 == 0 else ("Running", "Resident")
        await fleet.patch(execution={"state": state}, memory=dict.fromkeys(ALL, residency))
        await asyncio.sleep(0.1 + 0.3 * (flip % 4))
    await fleet.until_ready(timeout=90)
    async with load() as seen:
        await seen.more(4)
    assert answers.failures(seen.answers) == []
    assert starts(await fleet.read()) == before, "an engine restarted"
    assert (await plugin("check", fleet.name, "checksum")).code == 0
