"""One fleet of two engines through its whole life, under load: every fault leaves it serving one version at a time.

The tests run in order on the same fleet; each leaves it Ready.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence

import pytest
import pytest_asyncio

from e2e.cluster import Cluster
from e2e.deployment import answers, examples
from e2e.deployment.chart import Chart
from e2e.deployment.connection import Connection, core_path, pod_url
from e2e.deployment.faults import kill_container, kill_engine
from e2e.deployment.fleet import Fleet, is_ready
from e2e.deployment.router_client import Request, RouterClient
from e2e.deployment.traffic import Traffic
from e2e.fleet.conftest import PROMPT
from e2e.fleet.journal import Journal
from e2e.fleet.load import Load, steady_load
from sglang_rollout.api import ConditionType, SGLangRollout
from sglang_rollout.api.names import FIELD_MANAGER, FIELD_MANAGER_STATUS
from sglang_rollout.protocol.pod import ENGINE_PORT

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

START_SECONDS = 300
# Routes that SGLang answers without a key; none of them tells or changes anything.
OPEN_ROUTES = {"/health", "/health_generate", "/ready", "/metrics"}


# Runs in the pod: all routes of the engine, from its own description, asked for with its key.
READ_ROUTES = """
import json, urllib.request
record = json.load(open("/run/sglang-rollout/engine.json"))
request = urllib.request.Request("http://127.0.0.1:30000/openapi.json")
request.add_header("Authorization", "Bearer " + record["dataKey"])
paths = json.load(urllib.request.urlopen(request, timeout=20))["paths"]
print(json.dumps([(method.upper(), path) for path, methods in paths.items() for method in methods]))
"""


@pytest.fixture(scope="module")
def journal() -> Journal:
    return Journal()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def started(connection: Connection, cluster: Cluster, namespace: str) -> Fleet:
    """The quickstart fleet, as soon as `kubectl wait` calls it Ready."""
    fleet = Fleet(connection, namespace, "main")
    await fleet.create(examples.load(examples.QUICKSTART, name="main"))
    words = ("-n", namespace, "wait", "--for=condition=Ready", "sgr/main", f"--timeout={START_SECONDS}s")
    await asyncio.to_thread(cluster.kubectl, *words, timeout=START_SECONDS + 10)
    return fleet


@pytest_asyncio.fixture(loop_scope="session")
async def fleet(started: Fleet) -> Fleet:
    """The fleet as the test before left it: Ready."""
    await started.until_ready(timeout=120)
    return started


@pytest.fixture
def router(connection: Connection, started: Fleet) -> RouterClient:
    return RouterClient.of_fleet(connection, started.namespace, started.name)


@pytest.fixture
def load(router: RouterClient, journal: Journal, logprobs: dict[str, tuple[float, ...]]) -> Load:
    """Short and long requests."""
    requests = (Request(PROMPT, tokens=1, fingerprint=True),) * 2 + (Request(tokens=120),) * 2
    return steady_load(router, journal, logprobs, requests)


def none_failed(seen: Traffic) -> None:
    assert answers.failures(seen.answers) == []


def one_version_at_a_time(seen: Traffic, journal: Journal) -> None:
    assert answers.side_by_side(seen.answers, journal.order) == []


async def test_ready_means_that_all_engines_answer_through_the_router(fleet: Fleet, router: RouterClient) -> None:
    rollout = await fleet.read()
    assert rollout.status.routable_replicas == 2
    given = [await router.generate() for _ in range(6)]
    assert answers.failures(given) == []
    assert answers.versions(given) == {"1": 6}
    assert len({one.text for one in given}) == 1


async def test_kubectl_shows_a_table(fleet: Fleet, cluster: Cluster) -> None:
    table = await asyncio.to_thread(cluster.kubectl, "-n", fleet.namespace, "get", "sgr", "main")
    header, row = (line.split() for line in table.strip().splitlines())
    assert header == ["NAME", "ENGINES", "READY", "ROUTABLE", "STATE", "WEIGHTS", "STATUS", "AGE"]
    assert row[:-1] == ["main", "2", "2", "2", "Running", "1", "True"]


async def test_the_operator_writes_status_and_nothing_else(fleet: Fleet) -> None:
    seen = await fleet.object()
    metadata = seen["metadata"]
    assert metadata["generation"] == 1
    assert "annotations" not in metadata
    assert "finalizers" not in metadata
    writers = {entry["manager"]: set(entry["fieldsV1"]) for entry in metadata["managedFields"]}
    assert writers[FIELD_MANAGER_STATUS] == {"f:status"}
    assert FIELD_MANAGER not in writers


async def test_children_belong_to_the_resource(fleet: Fleet) -> None:
    uid = (await fleet.object())["metadata"]["uid"]
    children = await fleet.children()
    for kind in ("StatefulSet", "Deployment", "Service", "ConfigMap", "ServiceAccount", "PodDisruptionBudget"):
        assert children[kind], f"no {kind}"
        for child in children[kind]:
            owners = [(owner["kind"], owner["uid"]) for owner in child["metadata"]["ownerReferences"]]
            assert owners == [("SGLangRollout", uid)], child["metadata"]["name"]


async def test_an_engine_answers_nobody_without_its_key(fleet: Fleet, cluster: Cluster, connection: Connection) -> None:
    pod = "main-e0-0"
    words = ("-n", fleet.namespace, "exec", pod, "-c", "agent", "--", "python3", "-c", READ_ROUTES)
    routes = json.loads(await asyncio.to_thread(cluster.kubectl, *words))
    assert len(routes) > 60
    base = pod_url(fleet.namespace, pod, ENGINE_PORT)
    answered = {}
    for method, path in routes:
        if path not in OPEN_ROUTES:
            answer = await connection.client.request(method, base + path, json={}, timeout=20)
            answered[f"{method} {path}"] = answer.status_code
    assert {route: code for route, code in answered.items() if code not in (401, 403)} == {}


async def test_a_pause_holds_requests_and_loses_none(fleet: Fleet, load: Load, router: RouterClient) -> None:
    async with load() as seen:
        generation = await fleet.patch(execution={"state": "Paused"})
        rollout = await fleet.until_ready(timeout=30)
        assert rollout.status.execution_state == "Paused"
        assert rollout.status.observed_generation == generation
        # Answers that were on their way when the last engine stopped.
        await asyncio.sleep(1)
        paused = time.monotonic()
        arriving = [asyncio.create_task(router.generate()) for _ in range(4)]
        await asyncio.sleep(3)
        assert [one for one in seen.answers if one.received > paused] == []
        assert not any(task.done() for task in arriving)
        await fleet.patch(execution={"state": "Running"})
        assert answers.failures([await task for task in arriving]) == []
        await fleet.until_ready(timeout=30)
        await seen.more(4)
    none_failed(seen)


async def test_ready_is_never_true_for_an_older_generation(fleet: Fleet, cluster: Cluster) -> None:
    for state in ("Paused", "Running"):
        await fleet.patch(execution={"state": state})
        words = ("-n", fleet.namespace, "wait", "--for=condition=Ready", "sgr/main", "--timeout=30s")
        await asyncio.to_thread(cluster.kubectl, *words)
        rollout = await fleet.read()
        assert rollout.status.execution_state == state
        assert {engine.paused for engine in rollout.status.engines} == {state == "Paused"}


async def test_weights_move_all_at_once(fleet: Fleet, load: Load, journal: Journal, router: RouterClient) -> None:
    before = await router.generate()
    async with load() as seen:
        label, path = journal.next()
        await fleet.move_weights(label, path)
        rollout = await fleet.until_serving(label, timeout=60)
        await seen.more(8, version=label)
    none_failed(seen)
    one_version_at_a_time(seen, journal)
    after = await router.generate()
    assert (after.version, after.text == before.text) == (label, False)
    weights = rollout.status.weights
    assert weights is not None
    assert [entry.version for entry in weights.history] == journal.order


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("qwen3-other-shape", ("model.embed_tokens.weight", "[384, 192]", "[384, 128]")),
        ("qwen3-half-written", ("model.safetensors", "is it still being written?")),
        ("qwen3-missing-shard", ("model-00003-of-00003.safetensors",)),
        ("no-such-folder", ("/models/no-such-folder", "is not a folder")),
    ],
)
async def test_a_bad_checkpoint_is_refused_and_the_old_version_serves_on(
    fleet: Fleet, load: Load, journal: Journal, model: str, words: Sequence[str]
) -> None:
    starts = [engine.start_id for engine in (await fleet.read()).status.engines]
    async with load() as seen:
        await fleet.move_weights(f"bad-{model}", f"/models/{model}")
        await fleet.until_condition(ConditionType.DEGRADED, True, "main-e", journal.current, *words, timeout=20)
        await seen.more(8, version=journal.current)
        path = f"/models/{journal.models[journal.current]}"
        await fleet.move_weights(journal.current, path)
        await fleet.until_serving(journal.current, timeout=30)
    none_failed(seen)
    assert answers.versions(seen.answers).keys() == {journal.current}
    assert [engine.start_id for engine in (await fleet.read()).status.engines] == starts, "an engine restarted"


async def test_a_rolling_update_serves_both_versions_within_the_bound(
    fleet: Fleet, load: Load, journal: Journal
) -> None:
    async with load() as seen:
        label, path = journal.next()
        rolling = {"updateStrategy": {"type": "Rolling", "maxUnavailable": 1}}
        await fleet.connection.merge(fleet.path, {"spec": {"staleness": {"maxVersionLag": 1}, "weights": rolling}})
        await fleet.move_weights(label, path)
        await fleet.until_serving(label, timeout=60)
        await seen.more(8, version=label)
    none_failed(seen)
    assert answers.versions(seen.answers).keys() == set(journal.order[-2:])
    at_once = {"updateStrategy": {"type": "AllAtOnce"}}
    await fleet.patch(staleness={"maxVersionLag": 0}, weights=at_once)


async def test_an_agent_killed_in_a_move_takes_it_up_again(
    fleet: Fleet, load: Load, journal: Journal, cluster: Cluster
) -> None:
    pod = await fleet.pod(0)
    async with load() as seen:
        label, path = journal.next()
        await fleet.move_weights(label, path)
        await asyncio.to_thread(kill_container, cluster, pod, "agent")
        await fleet.until_serving(label, timeout=120)
        await seen.more(8, version=label)
    none_failed(seen)
    one_version_at_a_time(seen, journal)


async def test_a_leader_killed_in_a_move_leaves_it_to_the_standby(
    fleet: Fleet, load: Load, journal: Journal, cluster: Cluster, chart: Chart
) -> None:
    leader = await asyncio.to_thread(chart.leader)
    path = core_path(chart.namespace, "pods", leader)
    async with load() as seen:
        # An agent that is away holds the move open, so that the leader dies within it.
        await asyncio.to_thread(kill_container, cluster, await fleet.pod(1), "agent")
        label, model = journal.next()
        await fleet.move_weights(label, model)
        await asyncio.to_thread(kill_container, cluster, await fleet.connection.get(path), "operator")
        await fleet.until_serving(label, timeout=120)
        await seen.more(8, version=label)
    none_failed(seen)
    one_version_at_a_time(seen, journal)
    assert await asyncio.to_thread(chart.leader) != leader


async def test_a_killed_engine_returns_with_new_keys_at_the_current_version(
    fleet: Fleet, load: Load, journal: Journal, cluster: Cluster
) -> None:
    before = await fleet.engine(1)
    async with load() as seen:
        await asyncio.to_thread(kill_engine, cluster, await fleet.pod(1))

        def back(one: SGLangRollout) -> bool:
            engine = one.status.engines[1]
            return engine.routable and engine.start_id != before.start_id

        await fleet.until("the engine's return", back, timeout=START_SECONDS)
        healed = time.monotonic()
        await seen.more(8)
    assert answers.versions(seen.answers).keys() == {journal.current}
    assert answers.failures(seen.since(healed)) == []
    assert (await fleet.engine(1)).incarnation > before.incarnation


async def test_a_deleted_pod_drains_and_returns_at_the_current_version(
    fleet: Fleet, load: Load, journal: Journal
) -> None:
    before = await fleet.engine(0)
    async with load() as seen:
        await fleet.delete_pod("main-e0-0")

        def back(one: SGLangRollout) -> bool:
            engine = one.status.engines[0]
            return engine.routable and engine.incarnation > before.incarnation

        await fleet.until("the pod's return", back, timeout=START_SECONDS)
        await fleet.until_ready(timeout=60)
        await seen.more(8)
    none_failed(seen)
    assert answers.versions(seen.answers).keys() == {journal.current}


async def test_a_new_router_pod_gets_no_request_before_it_has_its_workers(
    fleet: Fleet, load: Load, journal: Journal
) -> None:
    (pod,) = await fleet.router_pods()
    async with load() as seen:
        await fleet.delete_pod(pod["metadata"]["name"], grace_seconds=0)

        def replaced(one: SGLangRollout) -> bool:
            return is_ready(one, one.metadata.generation) and one.status.router is not None

        await asyncio.sleep(1)
        await fleet.until("a new router in step", replaced, timeout=120)
        await seen.more(8)
    # A router without workers answers 404; without a router the Service has no address.
    assert [one for one in seen.answers if one.status == 404] == []
    assert answers.versions(seen.answers).keys() == {journal.current}
    (new,) = [one for one in await fleet.router_pods() if "deletionTimestamp" not in one["metadata"]]
    assert new["metadata"]["uid"] != pod["metadata"]["uid"]


async def test_the_fleet_grows_and_shrinks(fleet: Fleet, load: Load, journal: Journal, cluster: Cluster) -> None:
    async with load() as seen:
        for replicas in (3, 2):
            scale = ("-n", fleet.namespace, "scale", "sgr/main", f"--replicas={replicas}")
            await asyncio.to_thread(cluster.kubectl, *scale)
            rollout = await fleet.until_ready(timeout=START_SECONDS)
            assert rollout.status.routable_replicas == replicas
            assert [engine.name for engine in rollout.status.engines] == [f"main-e{n}" for n in range(replicas)]
            await seen.more(8)
    none_failed(seen)
    assert answers.versions(seen.answers).keys() == {journal.current}


async def test_nothing_is_left_of_a_deleted_fleet(started: Fleet) -> None:
    await started.delete()
    await started.until_gone(timeout=180)
