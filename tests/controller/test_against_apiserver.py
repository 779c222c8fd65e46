"""The whole operator process against a real API server: what it writes, what it leaves alone, who leads."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime
from typing import Any

import aiohttp
import pytest

from e2e.cluster.apiserver import ISSUER, ApiServer
from sglang_rollout.api import names
from sglang_rollout.controller.kinds import (
    CONFIG_MAP,
    DEPLOYMENT,
    EVENT,
    LEASE,
    ROLLOUT,
    SERVICE,
    SERVICE_ACCOUNT,
    STATEFUL_SET,
    Object,
)
from sglang_rollout.controller.kube_errors import Conflict, NotFound, Refused
from sglang_rollout.protocol.fleet import Trust, audience
from sglang_rollout.transitions.observed import Observed
from sglang_rollout.transitions.plan import plan
from sglang_rollout.transitions.planned import EventNote, Plan
from tests.controller import fleets
from tests.controller.fake_kube import eventually
from tests.controller.operators import Fleet, client, exists, fleet, new_lease, operator, operator_program, until

pytestmark = pytest.mark.apiserver

OPERATOR = "system:serviceaccount:ops:operator"


async def settled(fleet: Fleet, generation: int | None = None) -> Object:
    """The resource once its status answers its generation."""
    async with asyncio.timeout(20):
        while True:
            found = await fleet.get()
            wanted = generation or found["metadata"]["generation"]
            if found.get("status", {}).get("observedGeneration") == wanted:
                return found
            await asyncio.sleep(0.02)


async def told(fleet: Fleet, sentence: str) -> None:
    """Returns when a condition says so."""

    async def says() -> bool:
        return sentence in str((await fleet.get()).get("status", {}).get("conditions"))

    await until(says)


def managers(value: Object) -> set[tuple[str, str]]:
    return {(entry["manager"], entry["operation"]) for entry in value["metadata"]["managedFields"]}


async def trust_of(fleet: Fleet) -> Trust:
    uid = (await fleet.get())["metadata"]["uid"]
    return Trust(audience(uid), ISSUER, [OPERATOR], await fleet.kube.get_path("/openid/v1/jwks"))


async def test_children_are_ours_alone_and_the_resource_bears_no_trace_but_its_status(server: ApiServer) -> None:
    async with operator(server, new_lease()), fleet(server, "owned") as owned:
        await owned.create(replicas=2)
        found = await settled(owned)
        for kind, name in ((STATEFUL_SET, "owned-e0"), (STATEFUL_SET, "owned-e1"), (CONFIG_MAP, "owned-fleet")):
            child = await exists(owned.kube, kind, name)
            assert managers(child) == {(names.FIELD_MANAGER, "Apply")}
            (owner,) = child["metadata"]["ownerReferences"]
            assert owner["uid"] == found["metadata"]["uid"]
        assert (names.FIELD_MANAGER_STATUS, "Apply") in managers(found)
        ours = {manager for manager, _ in managers(found)} - {"python"}
        test_client = {manager for manager, operation in managers(found) if operation == "Update"}
        assert ours - test_client == {names.FIELD_MANAGER_STATUS}, "kopf, or somebody else, wrote to the resource"
        assert not found["metadata"].get("annotations")
        assert not found["metadata"].get("finalizers")


async def test_nothing_is_written_when_nothing_changes(server: ApiServer) -> None:
    async with operator(server, new_lease()) as running, fleet(server, "still") as still:
        await still.create()
        await settled(still)
        await exists(still.kube, DEPLOYMENT, "still-router")
        await asyncio.sleep(0.5)
        before = {
            (verb, resource): count for verb, resource, count in _writes(running.process.metrics.registry.collect())
        }
        versions = [(await still.get())["metadata"]["resourceVersion"]]
        for _ in range(5):
            running.process.queue.add(("ns", "still"))
            await asyncio.sleep(0.05)
        after = {
            (verb, resource): count for verb, resource, count in _writes(running.process.metrics.registry.collect())
        }
        versions.append((await still.get())["metadata"]["resourceVersion"])
        assert before == after
        assert versions[0] == versions[1]


def _writes(families: Any) -> list[tuple[str, str, float]]:
    return [
        (sample.labels["verb"], sample.labels["resource"], sample.value)
        for family in families
        for sample in family.samples
        if sample.name == "sglang_rollout_kube_requests_total"
        and sample.labels["verb"] in ("apply", "create", "merge", "delete")
    ]


async def test_drift_is_repaired(server: ApiServer) -> None:
    async with operator(server, new_lease()), fleet(server, "drift") as drift:
        await drift.create()
        await settled(drift)
        config_map = await exists(drift.kube, CONFIG_MAP, "drift-fleet")
        await drift.kube.merge(CONFIG_MAP, "ns", "drift-fleet", {"data": {"fleet.json": "{}"}})
        service = await exists(drift.kube, SERVICE, "drift-router")
        await drift.kube.delete(SERVICE, "ns", "drift-router", service["metadata"]["uid"])

        async def repaired() -> bool:
            found = await drift.kube.get(CONFIG_MAP, "ns", "drift-fleet")
            return bool(found["data"] == config_map["data"])

        await until(repaired)
        again = await exists(drift.kube, SERVICE, "drift-router")
        assert again["metadata"]["uid"] != service["metadata"]["uid"]


async def test_a_foreign_object_of_the_same_name_is_left_alone_and_told(server: ApiServer) -> None:
    async with operator(server, new_lease()), fleet(server, "foreign") as foreign:
        mine = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "foreign-fleet", "namespace": "ns"}}
        await foreign.kube.create(CONFIG_MAP, {**mine, "data": {"mine": "yes"}})
        await foreign.create()
        await told(foreign, "foreign-fleet belongs to another owner")
        assert (await foreign.kube.get(CONFIG_MAP, "ns", "foreign-fleet"))["data"] == {"mine": "yes"}


async def test_a_refused_child_is_told_in_the_status(server: ApiServer) -> None:
    async with operator(server, new_lease()), fleet(server, "refused") as refused:
        template = {"spec": {"containers": [{"name": "engine", "volumeMounts": [{"name": "none", "mountPath": "/x"}]}]}}
        await refused.create(engine={"image": "sglang:1", "template": template})
        await told(refused, "volumeMounts")


async def test_agents_are_told_at_once_with_a_token_that_they_can_verify(server: ApiServer) -> None:
    """Prints how long a spec's patch takes to reach the planner and the agents."""
    planned: dict[int, float] = {}

    def timed(observed: Observed, now: datetime) -> Plan:
        planned.setdefault(observed.rollout.metadata.generation, time.perf_counter())
        return plan(observed, now)

    async with operator(server, new_lease(), timed), fleet(server, "quick") as quick:
        await quick.create(replicas=4)
        trust = await trust_of(quick)
        pods = [await quick.add_pod(index, trust) for index in range(4)]
        await eventually(lambda: all(pod.heard for pod in pods), 20)
        assert {desired.lease_term for pod in pods for desired in pod.heard} == {1}
        to_planner, to_agents = [], []
        for turn in range(20):
            state = "Paused" if turn % 2 == 0 else "Running"
            told = asyncio.Event()

            def hear(desired: Any, state: str = state, told: asyncio.Event = told) -> None:
                if all(pod.heard[-1].execution.state.value == state for pod in pods):
                    told.set()

            for pod in pods:
                pod.on_desired = hear
            started = time.perf_counter()
            patched = await quick.patch(execution={"state": state})
            await asyncio.wait_for(told.wait(), 10)
            to_agents.append(time.perf_counter() - started)
            to_planner.append(planned[patched["metadata"]["generation"]] - started)
        print(f"\nspec patch to planner: {_milliseconds(to_planner)}; to 4 agents: {_milliseconds(to_agents)}")


def _milliseconds(values: list[float]) -> str:
    ordered = sorted(values)
    return f"p50 {ordered[len(ordered) // 2] * 1e3:.1f} ms, worst {ordered[-1] * 1e3:.1f} ms"


@pytest.mark.timeout(180)
async def test_a_standby_takes_over_at_once_and_with_a_higher_term(server: ApiServer) -> None:
    """Prints how long a fleet is without a leader: after a stop in good order."""
    lease = new_lease()
    async with operator_program(server, lease, "one") as one, client(server) as kube:
        await exists(kube, LEASE, lease, "ops", seconds=90)  # a new interpreter, maybe on a busy machine
        async with operator(server, lease, pod_name="two") as two, fleet(server, "handover") as handover:
            await handover.create()
            pod = await handover.add_pod(0, await trust_of(handover))
            await eventually(lambda: pod.heard, 20)
            await eventually(lambda: not two.process.ready_problem(), 20)
            assert not two.process.lease.leading
            stopped = time.perf_counter()
            one.terminate()
            await eventually(lambda: pod.heard[-1].lease_term == 2, 20)
            print(f"\nleader stopped to agents told by the next: {time.perf_counter() - stopped:.2f} s")
            assert await asyncio.wait_for(one.wait(), 20) == 0
            assert (await kube.get(LEASE, "ops", lease))["spec"]["leaseTransitions"] == 2


async def test_an_operator_that_was_deposed_ends(server: ApiServer) -> None:
    lease = new_lease()
    async with operator(server, lease) as running, client(server) as kube:
        await running.leads()
        found = await kube.get(LEASE, "ops", lease)
        await kube.merge(LEASE, "ops", lease, {"spec": {**found["spec"], "holderIdentity": "other"}})
        assert await asyncio.wait_for(running.task, 20) == 1


async def test_terms_go_on_when_the_lease_was_deleted(server: ApiServer) -> None:
    async with operator(server, new_lease()), fleet(server, "terms") as terms:
        await terms.create()
        pod = await terms.add_pod(0)
        await eventually(lambda: pod.heard, 20)
        pod.term = 41
        pod.report(lease_term=41)
        await terms.patch(execution={"state": "Paused"})
        await eventually(lambda: pod.heard[-1].lease_term == 42, 20)


async def test_a_decision_never_overwrites_a_newer_resource(server: ApiServer) -> None:
    """The plan is made from a resource that changes before the decision is written: it is planned again."""
    seen: list[int] = []
    racing = asyncio.Event()

    def decide(observed: Observed, now: datetime) -> Plan:
        seen.append(observed.rollout.metadata.generation)
        made = plan(observed, now)
        if observed.rollout.spec.replicas == 2 and not racing.is_set():
            racing.set()
            server.kubectl("patch", "sgr", "race", "-n", "ns", "--type=merge", "-p", '{"spec":{"replicas":3}}')
        note = EventNote("Normal", "Decided", f"for {seen[-1]}")
        return fleets.plan(made.status, events=(note,), decision=True)

    async with operator(server, new_lease(), decide), fleet(server, "race") as race:
        await race.create(replicas=1)
        await settled(race)
        await race.patch(replicas=2)
        await settled(race, 3)
        assert seen[-1] == 3

        async def notes() -> set[str]:
            found, _ = await race.kube.list(EVENT, "ns")
            return {event["note"] for event in found if event["reason"] == "Decided"}

        async def decided() -> bool:
            return "for 3" in await notes()

        await until(decided)
        assert "for 2" not in await notes(), "an event told of a decision that was never written"


async def test_a_deleted_resource_is_forgotten(server: ApiServer) -> None:
    async with operator(server, new_lease()) as running, fleet(server, "gone") as gone:
        await gone.create()
        pod = await gone.add_pod(0)
        await eventually(lambda: pod.heard, 20)
        uid = (await settled(gone))["metadata"]["uid"]
        await gone.kube.delete(ROLLOUT, "ns", "gone", uid)
        await eventually(lambda: not running.process._agents.of(("ns", "gone")), 10)
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"http://127.0.0.1:{running.process.server.port}/metrics") as response,
        ):
            assert 'fleet="gone"' not in await response.text()


async def test_probes_answer(server: ApiServer) -> None:
    async with operator(server, new_lease()) as running, aiohttp.ClientSession() as http:
        await running.leads()
        for path in ("livez", "readyz", "metrics"):
            async with http.get(f"http://127.0.0.1:{running.process.server.port}/{path}") as response:
                assert response.status == 200
                text = await response.text()
        assert "sglang_rollout_leader 1.0" in text
        assert 'sglang_rollout_watch_last_event_age_seconds{namespace="ns",resource="pods"}' in text


async def test_the_client_tells_errors_apart(server: ApiServer) -> None:
    async with client(server) as kube:
        with pytest.raises(NotFound):
            await kube.get(CONFIG_MAP, "ns", "no-such")
        with pytest.raises(NotFound):
            await kube.delete(CONFIG_MAP, "ns", "no-such", "uid")
        account = await kube.get(SERVICE_ACCOUNT, "ops", "operator")
        with pytest.raises(Conflict):
            await kube.delete(SERVICE_ACCOUNT, "ops", "operator", "another")
        with pytest.raises(Conflict):
            await kube.create(SERVICE_ACCOUNT, {**account, "metadata": {"name": "operator", "namespace": "ops"}})
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x", "namespace": "ns"}, "dta": {}}
        with pytest.raises(Refused, match="field not declared in schema"):
            await kube.apply(CONFIG_MAP, body, "test")
