"""One engine over two pods: it generates, moves its weights, and lives and dies as one."""

from __future__ import annotations

import asyncio

import pytest
import pytest_asyncio

from e2e.cluster import Cluster
from e2e.deployment import answers, examples
from e2e.deployment.connection import Connection
from e2e.deployment.fleet import Fleet
from e2e.deployment.plugin import Plugin
from e2e.deployment.router_client import Request, RouterClient
from e2e.deployment.streams import streams
from e2e.deployment.traffic import traffic
from e2e.fleet.conftest import PROMPT
from sglang_rollout.api import SGLangRollout

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

START_SECONDS = 400
FINGERPRINT = Request(PROMPT, tokens=1, fingerprint=True)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def fleet(connection: Connection, namespace: str) -> Fleet:
    """The multi-node example, Ready."""
    fleet = Fleet(connection, namespace, "pair")
    await fleet.create(examples.load(examples.TWO_NODES, name="pair"))
    await fleet.until_ready(timeout=START_SECONDS)
    return fleet


@pytest.fixture
def router(connection: Connection, fleet: Fleet) -> RouterClient:
    return RouterClient.of_fleet(connection, fleet.namespace, fleet.name)


async def test_two_pods_are_one_engine(
    fleet: Fleet, router: RouterClient, logprobs: dict[str, tuple[float, ...]]
) -> None:
    pods = await fleet.engine_pods()
    assert sorted(pod["metadata"]["name"] for pod in pods) == ["pair-e0-0", "pair-e0-1"]
    assert (await fleet.read()).status.routable_replicas == 1
    answer = await router.generate(FINGERPRINT)
    assert answer.version == "1"
    assert answers.mislabelled([answer], {"1": logprobs["qwen3-v1"]}) == []


async def test_weights_move_on_both_ranks(
    fleet: Fleet, router: RouterClient, logprobs: dict[str, tuple[float, ...]]
) -> None:
    async with traffic(router, (FINGERPRINT, Request(tokens=60))) as seen:
        await seen.more(4)
        await fleet.move_weights("2", "/models/qwen3-v2")
        await fleet.until_serving("2", timeout=90)
        await seen.more(4, version="2")
    assert answers.failures(seen.answers) == []
    assert answers.side_by_side(seen.answers, ["1", "2"]) == []
    fingerprints = {"1": logprobs["qwen3-v1"], "2": logprobs["qwen3-v2"]}
    assert answers.mislabelled(seen.answers, fingerprints) == []


async def test_a_pause_and_a_checksum_are_of_the_whole_engine(fleet: Fleet, cluster: Cluster) -> None:
    plugin = Plugin(cluster, fleet.namespace)
    async with streams(fleet.connection, fleet.namespace, fleet.name, 1, Request(tokens=1000)) as flying:
        await flying.until("tokens", lambda all_: len(all_[0].tokens) > 2)
        await fleet.patch(execution={"state": "Paused"})
        assert (await plugin("pause", fleet.name)).code == 0
        await asyncio.sleep(1)  # for tokens that were made before the pause
        stood = flying.counts
        await asyncio.sleep(2)
        assert flying.counts == stood
        assert (await plugin("continue", fleet.name)).code == 0
        await flying.until_ended()
    assert [(one.error, one.finish, one.retractions) for one in flying.all] == [("", "length", 1)]
    said = await plugin("check", fleet.name, "checksum", "-o", "json")
    assert said.code == 0, said
    (engine,) = said.json["fleet"]["status"]["lastWeightCheck"]["engines"]
    assert engine["checksum"]


@pytest.mark.parametrize("lost", [1, 0])
async def test_losing_either_pod_recreates_both(fleet: Fleet, router: RouterClient, lost: int) -> None:
    before = await fleet.engine(0)
    async with traffic(router, (FINGERPRINT,)) as seen:
        await seen.more(2)
        await fleet.delete_pod(f"pair-e0-{lost}", grace_seconds=0)

        def recreated(one: SGLangRollout) -> bool:
            engine = one.status.engines[0]
            return engine.routable and not set(engine.pod_uids) & set(before.pod_uids)

        await fleet.until("a whole new group", recreated, timeout=START_SECONDS)
        await fleet.until_ready(timeout=60)
        await seen.more(4)
    after = await fleet.engine(0)
    assert after.incarnation > before.incarnation
    assert len(after.pod_uids) == 2
    assert answers.versions(seen.answers).keys() == {"2"}


async def test_nothing_is_left_of_a_deleted_fleet(fleet: Fleet) -> None:
    await fleet.delete()
    await fleet.until_gone(timeout=120)
