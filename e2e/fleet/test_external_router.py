"""Engines behind a router that we do not run: the operator keeps its workers, with a key that is mounted into it."""

from __future__ import annotations

import asyncio

import pytest
import pytest_asyncio

from e2e.cluster import Cluster
from e2e.deployment import answers, examples
from e2e.deployment.connection import Connection, core_path, service_url
from e2e.deployment.fleet import Fleet
from e2e.deployment.router_client import RouterClient
from e2e.deployment.site import Site
from e2e.deployment.traffic import traffic
from e2e.fleet import external_router

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(400)]


def theirs(namespace: str) -> dict[str, str]:
    """spec.router.external of that router."""
    url = f"http://{external_router.NAME}.{namespace}:{external_router.PORT}"
    return {"url": url, "credential": external_router.CREDENTIAL["name"]}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def fleet(connection: Connection, cluster: Cluster, namespace: str, where: Site) -> Fleet:
    """One engine, Ready behind that router."""
    assert namespace == external_router.FLEETS
    await asyncio.to_thread(external_router.create_router, cluster, namespace, where.images["router"])
    fleet = Fleet(connection, namespace, "guest")
    manifest = examples.load(examples.QUICKSTART, name="guest", replicas=1)
    manifest["spec"]["router"] = {"external": theirs(namespace)}
    await fleet.create(manifest)
    await fleet.until_ready(timeout=300)
    return fleet


@pytest.fixture
def router(connection: Connection, namespace: str) -> RouterClient:
    return RouterClient(connection, service_url(namespace, external_router.NAME, external_router.PORT))


async def test_the_engine_answers_through_their_router(fleet: Fleet, router: RouterClient) -> None:
    assert not (await fleet.children())["Deployment"], "we made a router of our own"
    given = [await router.generate() for _ in range(3)]
    assert answers.versions(given) == {"1": 3}


async def test_weights_move_behind_their_router(fleet: Fleet, router: RouterClient) -> None:
    async with traffic(router) as seen:
        await seen.more(4)
        await fleet.move_weights("2", "/models/qwen3-v2")
        await fleet.until_serving("2", timeout=60)
        await seen.more(4, version="2")
    assert answers.failures(seen.answers) == []
    assert answers.side_by_side(seen.answers, ["1", "2"]) == []


async def test_a_router_that_starts_anew_gets_its_worker_again(
    fleet: Fleet, router: RouterClient, connection: Connection
) -> None:
    pods = core_path(fleet.namespace, "pods")
    (pod,) = await connection.items(pods, f"app={external_router.NAME}")
    async with traffic(router) as seen:
        await connection.delete(f"{pods}/{pod['metadata']['name']}", grace_seconds=0)
        await seen.more(8, timeout=90)
    assert answers.versions(seen.answers).keys() == {"2"}


async def test_a_router_that_the_fleet_leaves_keeps_no_engine_of_it_and_gets_them_when_it_returns(
    fleet: Fleet, router: RouterClient, connection: Connection
) -> None:
    await fleet.patch(router={"external": None})
    await fleet.until_ready(timeout=180)
    own = RouterClient.of_fleet(connection, fleet.namespace, fleet.name)
    assert (await own.generate()).ok
    assert not (await router.generate(timeout=20)).ok
    await fleet.patch(router={"external": theirs(fleet.namespace)})
    await fleet.until_ready(timeout=180)
    assert (await router.generate()).ok
    assert not (await fleet.children())["Deployment"], "our own router is of no use any more"


async def test_a_deleted_fleet_is_gone_though_the_router_stays(fleet: Fleet) -> None:
    await fleet.delete()
    await fleet.until_gone(timeout=120)
