"""control: External. A trainer moves the weights by itself, through the agents; the operator follows, gates, and calls
nothing that changes an engine (docs/external-control.md)."""

from __future__ import annotations

import asyncio
import re
from collections import Counter

import pytest

from e2e.cluster import Cluster
from e2e.deployment import answers
from e2e.deployment.faults import kill_engine
from e2e.deployment.fleet import Fleet, is_ready
from e2e.deployment.site import Site
from e2e.fleet.journal import Journal
from e2e.fleet.load import Load
from e2e.fleet.operations.conftest import START_SECONDS
from e2e.fleet.operations.trainer_pod import ACCOUNT, STRANGER, create_trainer
from sglang_rollout.api import SGLangRollout

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

# SGLang's access log; what only reads is left out.
CALL = re.compile(r'"POST /(?!generate|v1/)(\w+)')


async def changing_calls(fleet: Fleet, cluster: Cluster, engine: int) -> Counter[str]:
    """Calls of control routes that the engine has logged."""
    pod = (await fleet.pod(engine))["metadata"]["name"]
    words = ("-n", fleet.namespace, "logs", pod, "-c", "engine", "--tail=-1")
    return Counter(CALL.findall(await asyncio.to_thread(cluster.kubectl, *words)))


async def test_a_trainer_drives_the_engines_by_itself(
    fleet: Fleet, cluster: Cluster, load: Load, journal: Journal, where: Site
) -> None:
    uid = (await fleet.object())["metadata"]["uid"]
    image = where.images["router"]
    trainer = await create_trainer(cluster, fleet.namespace, ACCOUNT, uid, image)
    agents = [engine.agent for engine in (await fleet.read()).status.engines]

    refused, calls = await trainer("pause", agents[0])
    assert (refused, calls[0]["status"]) == (1, 409), "the operator drives it"

    await fleet.patch(control="External", weights=None, execution=None, memory=None)
    await fleet.until_ready(timeout=60)
    before = await changing_calls(fleet, cluster, 0)
    async with load() as seen:
        label, path = journal.next()
        code, calls = await trainer("move", label, path, *agents)
        assert code == 0, calls
        await fleet.until_serving(label, timeout=30)
        await seen.more(4, version=label)
    assert [one for one in answers.failures(seen.answers) if not one.startswith(("404", "503"))] == []
    assert answers.side_by_side(seen.answers, journal.order) == []

    code, calls = await trainer("pause", *agents)
    assert code == 0, calls
    await fleet.until("a trainer's pause", lambda one: one.status.execution_state == "Paused", timeout=15)
    assert is_ready(await fleet.read(), 0)
    code, calls = await trainer("continue", *agents)
    assert code == 0, calls
    await fleet.until("a trainer's continue", lambda one: one.status.execution_state == "Running", timeout=15)

    made = await changing_calls(fleet, cluster, 0) - before
    expected = {"pause_generation": 2, "continue_generation": 2, "flush_cache": 1, "update_weights_from_disk": 1}
    assert made == Counter(expected), "somebody else than the trainer changed the engine"

    async with load() as seen:
        await _restarted_engine_waits_for_the_trainer(fleet, cluster, journal.current)
        agent = (await fleet.engine(1)).agent
        code, calls = await trainer("move", journal.current, journal.current_path, agent)
        assert code == 0, calls
        await fleet.until("the engine's return", lambda one: one.status.routable_replicas == 2, timeout=30)
        await seen.more(4)
    assert answers.versions(seen.answers).keys() == {journal.current}

    stranger = await create_trainer(cluster, fleet.namespace, STRANGER, uid, image)
    code, calls = await stranger("pause", agents[0])
    assert (code, calls[0]["status"]) == (1, 403)


async def _restarted_engine_waits_for_the_trainer(fleet: Fleet, cluster: Cluster, current: str) -> None:
    before = (await fleet.engine(1)).start_id
    await asyncio.to_thread(kill_engine, cluster, await fleet.pod(1))

    def up(rollout: SGLangRollout) -> bool:
        engine = rollout.status.engines[1]
        return engine.start_id not in ("", before) and engine.weight_version not in ("", current)

    await fleet.until("the engine at an older version", up, timeout=START_SECONDS)
    await asyncio.sleep(3)
    assert not (await fleet.engine(1)).routable
