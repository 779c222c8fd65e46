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
from e2e.deployment.fleet import Fleet
from e2e.deployment.plugin import Plugin
from e2e.fleet.journal import Journal
from e2e.fleet.operations.conftest import START_SECONDS, Load

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


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
