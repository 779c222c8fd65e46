"""Restart, profile, and what else `kubectl sgrollout` says of a fleet of real engines."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from pathlib import Path

import pytest

from e2e.cluster import Cluster
from e2e.deployment import answers
from e2e.deployment.connection import Connection
from e2e.deployment.fleet import Fleet
from e2e.deployment.plugin import Plugin
from e2e.deployment.router_client import Request, RouterClient
from e2e.deployment.streams import streams
from e2e.fleet.journal import Journal
from e2e.fleet.load import Load
from e2e.fleet.operations.conftest import RUNNING, START_SECONDS

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

LONG_PROMPT = "the router sends a request to an engine and waits for its answer, " * 4
"""So long that SGLang keeps its KV cache for the next request with the same beginning."""


async def test_a_profile_says_where_its_files_are(
    fleet: Fleet, plugin: Plugin, load: Load, cluster: Cluster, tmp_path: Path
) -> None:
    async with load():
        said = await plugin("profile", fleet.name, "--steps", "3")
    assert said.code == 0, said
    message = (await fleet.object())["status"]["lastProfile"]["message"]
    copies = re.findall(r"kubectl (cp [^;]+)", message)
    assert len(copies) == 2
    for number, copy in enumerate(copies):
        *words, _ = shlex.split(copy)
        target = tmp_path / str(number)
        await asyncio.to_thread(cluster.kubectl, *words, str(target))
        assert [file for file in target.rglob("*.trace.json.gz") if file.stat().st_size > 0], message


async def test_a_flush_forgets_the_cache(fleet: Fleet, plugin: Plugin, router: RouterClient) -> None:
    request = Request(LONG_PROMPT)
    for _ in range(4):  # each engine has had it at least once
        assert (await router.generate(request)).ok
    said = await plugin("flush-cache", fleet.name, "-o", "json")
    assert said.code == 0, said
    assert said.json["fleet"]["status"]["lastFlushCache"]["message"] == "2 engines"
    first = await router.generate(request)
    assert first.cached_tokens == 0
    later = [await router.generate(request) for _ in range(4)]
    assert max(answer.cached_tokens for answer in later) > 0


async def test_an_abort_ends_what_runs_and_what_is_queued(
    fleet: Fleet, plugin: Plugin, connection: Connection, router: RouterClient
) -> None:
    request = Request(tokens=3000)
    async with streams(connection, fleet.namespace, fleet.name, 4 * RUNNING, request) as flying:
        await flying.until("tokens", lambda all_: sum(len(one.tokens) > 2 for one in all_) >= 2 * RUNNING)
        said = await plugin("abort", fleet.name)
        assert said.code == 0, said
        await flying.until("their end", lambda all_: all(one.ended for one in all_))
        assert {one.finish for one in flying.all} == {"abort"}, [one.error for one in flying.all]
    assert (await router.generate()).ok
    assert (await fleet.read()).status.execution_state == "Running"


async def test_a_busy_fleet_is_flushed_under_a_pause(fleet: Fleet, plugin: Plugin, connection: Connection) -> None:
    request = Request(tokens=1200)
    async with streams(connection, fleet.namespace, fleet.name, 2 * RUNNING, request) as flying:
        await flying.until("tokens", lambda all_: all(len(one.tokens) > 2 for one in all_))
        assert (await plugin("pause", fleet.name)).code == 0
        said = await plugin("flush-cache", fleet.name)
        assert said.code == 0, said
        assert (await plugin("continue", fleet.name)).code == 0
        await flying.until("their end", lambda all_: all(one.ended for one in all_))
        assert {(one.finish, len(one.tokens)) for one in flying.all} == {("length", 1200)}


async def test_a_restart_replaces_every_pod_in_turn_and_once(
    fleet: Fleet, plugin: Plugin, load: Load, journal: Journal
) -> None:
    before = {pod["metadata"]["uid"] for pod in await fleet.engine_pods()}
    routable: set[int] = set()
    async with load() as seen:
        restarting = asyncio.create_task(plugin("restart", fleet.name, "--request-id", "r1", timeout=2 * START_SECONDS))
        while not restarting.done():
            routable.add((await fleet.read()).status.routable_replicas)
            await asyncio.sleep(0.5)
        said = await restarting
        assert said.code == 0, said
        await seen.more(4)
    assert answers.failures(seen.answers) == []
    assert answers.versions(seen.answers).keys() == {journal.current}
    assert min(routable) == 1
    after = {pod["metadata"]["uid"] for pod in await fleet.engine_pods()}
    assert len(after) == 2
    assert not after & before
    again = await plugin("restart", fleet.name, "--request-id", "r1", timeout=30)
    assert again.code == 0
    assert {pod["metadata"]["uid"] for pod in await fleet.engine_pods()} == after


async def test_the_plugin_tells_of_the_fleet(fleet: Fleet, plugin: Plugin, load: Load, journal: Journal) -> None:
    status = await plugin("status", fleet.name, "-o", "json")
    assert (status.code, status.json["ready"]) == (0, True)
    assert (await plugin("status", fleet.name)).code == 0
    assert (await plugin("status", "nobody")).code == 4
    assert (await plugin("weights", "wait", fleet.name, journal.current)).code == 0
    assert (await plugin("weights", "wait", fleet.name, "no-such-version", "--timeout", "1s")).code == 3
    history = await plugin("weights", "history", fleet.name, "-o", "json")
    assert history.json["items"][-1]["version"] == journal.current
    refused = await plugin("weights", "set", fleet.name, "bad", "--path", "/models/no-such-folder")
    assert refused.code == 1
    assert "/models/no-such-folder" in refused.err
    back = await plugin("weights", "set", fleet.name, journal.current, "--path", journal.current_path)
    assert back.code == 0, back
    async with load():
        top = await plugin("top", fleet.name, "-o", "json")
    assert [engine["load"]["paused"] for engine in top.json["engines"]] == [0, 0]
    logs = await plugin("logs", fleet.name, "--tail", "3", "-o", "json")
    assert {json.loads(line)["pod"] for line in logs.out.splitlines()} == {"ops-e0-0", "ops-e1-0"}
