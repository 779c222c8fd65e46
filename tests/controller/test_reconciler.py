"""One pass: a new leader hears the pods before it plans, conflicts are planned again, broken resources are told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from sglang_rollout.api import names
from sglang_rollout.controller import external_router
from sglang_rollout.controller.applies import Applier
from sglang_rollout.controller.caches import Caches
from sglang_rollout.controller.cluster_keys import ClusterKeys
from sglang_rollout.controller.events import EventRecorder
from sglang_rollout.controller.executor import Executor, Outcome
from sglang_rollout.controller.external_router import ExternalRouters, ExternalTarget, Membership, keeper_on
from sglang_rollout.controller.kinds import CORE_EVENT, POD, ROLLOUT, STATEFUL_SET, Object
from sglang_rollout.controller.links import LinkContext, LinkPool
from sglang_rollout.controller.process import AGENTS, ROUTERS
from sglang_rollout.controller.reconciler import WARM_UP_SECONDS, Reconciler
from sglang_rollout.controller.rollouts import Rollouts, WentBack
from sglang_rollout.controller.settings import Settings
from sglang_rollout.controller.tokens import FleetTokens
from sglang_rollout.protocol.desired import AgentDesired
from sglang_rollout.protocol.report import AgentReport
from sglang_rollout.protocol.routing import RegisteredWorker, RouterDesired, RouterReport, Worker
from sglang_rollout.transitions.observed import Observed
from sglang_rollout.transitions.planned import Plan
from tests.controller import fleets
from tests.controller.fake_kube import FakeKube, eventually
from tests.controller.fake_pod import FakePod
from tests.controller.test_links import FakeLease

KEY = ("ns", "fleet")
SETTINGS = Settings("ops", "operator-0", "operator", "agent:1", "router:1", pod_labels={"app": "operator"})


class FakeMembership:
    """A router that is always as desired, or says why not."""

    def __init__(self, target: ExternalTarget) -> None:
        self.target = target
        self.desired: list[RouterDesired | None] = []
        self.refuses = ""

    async def step(self, desired: RouterDesired | None) -> RouterReport:
        self.target.read_credential()
        self.desired.append(desired)
        in_step = desired is not None and not self.refuses
        had = [RegisteredWorker("u", "e0", 1, True)] if self.refuses else []
        named = desired.id if desired else ""
        return RouterReport(0, "s", "", desired_id=named, in_step=in_step, registered=had, message=self.refuses)


@dataclass
class Bench:
    kube: FakeKube
    rollouts: Rollouts
    caches: Caches
    reconciler: Reconciler
    external: ExternalRouters
    queued: list[tuple[str, str]]
    seen: list[Observed] = field(default_factory=list)
    make_plan: Callable[[Observed], Plan] = lambda observed: fleets.plan(
        fleets.status("x", generation=observed.rollout.metadata.generation)
    )
    memberships: list[FakeMembership] = field(default_factory=list)
    pods: list[FakePod] = field(default_factory=list)
    seconds: float = 1000.0

    async def resource(self, **spec: Any) -> None:
        self.rollouts.put(self.kube.put(ROLLOUT, fleets.rollout(**spec)))

    async def pod(self, name: str, labels: dict[str, str], *, answers: bool) -> Object:
        address = f"127.0.2.{len(self.pods) + 2}"
        value = self.kube.put(
            POD,
            {
                "metadata": {"name": name, "namespace": "ns", "labels": labels},
                "status": {"podIP": address, "phase": "Running"},
            },
        )
        if answers:
            self.pods.append(await FakePod(value["metadata"]["uid"]).start(address, AGENTS.port))
        await eventually(lambda: self.caches.pods.get(("ns", name)))
        return value

    async def reconcile(self) -> Outcome:
        return await asyncio.wait_for(self.reconciler.reconcile(KEY), 5)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    kube, lease, rollouts = FakeKube(), FakeLease(), Rollouts()
    queued: list[tuple[str, str]] = []

    def put(value: Object) -> None:
        rollouts.put(value)

    def make(target: ExternalTarget) -> Membership:
        made.memberships.append(FakeMembership(target))
        return made.memberships[-1]

    def planner(observed: Observed, now: datetime) -> Plan:
        made.seen.append(observed)
        return made.make_plan(observed)

    tokens = FleetTokens(kube, "ops", "operator")
    context = LinkContext(tokens, lease)
    agents: LinkPool[AgentDesired, AgentReport] = LinkPool(AGENTS, context, queued.append)
    routers: LinkPool[RouterDesired, RouterReport] = LinkPool(ROUTERS, context, queued.append)
    external = ExternalRouters(make, lease, tmp_path, queued.append)
    caches = Caches(kube, (), queued.append)
    keys = ClusterKeys(kube, "system:serviceaccount:ops:operator", lambda: None)
    await keys.load()
    events = EventRecorder(kube, "operator-0")
    executor = Executor(
        kube=kube,
        lease=lease,
        applier=Applier(kube, caches),
        agents=agents,
        routers=routers,
        external=external,
        events=events,
        on_written=put,
    )
    reconciler = Reconciler(
        settings=SETTINGS,
        kube=kube,
        rollouts=rollouts,
        caches=caches,
        keys=keys,
        tokens=tokens,
        agents=agents,
        routers=routers,
        external=external,
        executor=executor,
        events=events,
        planner=planner,
        on_read=put,
        clock=lambda: made.seconds,
        now=lambda: fleets.NOW,
    )
    made = Bench(kube, rollouts, caches, reconciler, external, queued)
    tasks = [asyncio.create_task(informer.run()) for informer in caches.informers]
    await caches.synced()
    yield made
    for task in tasks:
        task.cancel()
    await asyncio.gather(agents.close(), routers.close(), external.close(), *tasks, return_exceptions=True)
    for pod in made.pods:
        await pod.stop()


async def test_what_is_observed_is_all_that_is_known(bench: Bench) -> None:
    await bench.resource()
    pod = await bench.pod("fleet-e3-0", {**names.engine_labels("fleet", 3), names.LABEL_RANK: "0"}, answers=True)
    bench.kube.put(STATEFUL_SET, fleets.stateful_set("fleet-e3"))
    await eventually(lambda: bench.caches.child("StatefulSet", "ns", "fleet-e3"))
    await bench.reconcile()
    await eventually(lambda: bench.reconciler.agents.settled(KEY))
    await bench.reconcile()
    observed = bench.seen[-1]
    assert [(view.name, view.engine, view.rank) for view in observed.pods] == [("fleet-e3-0", 3, 0)]
    assert observed.agents[pod["metadata"]["uid"]].agent_start == "start-1"
    assert observed.children["StatefulSet", "fleet-e3"].owner_uid == "uid-fleet"
    assert observed.context.operator_pod_labels == {"app": "operator"}
    assert observed.context.trust.audience == "sglang-rollout:uid-fleet"
    assert observed.context.trust.callers == ["system:serviceaccount:ops:operator"]
    assert observed.context.trust.issuer == "https://issuer"


async def test_a_new_leader_plans_when_every_pod_has_answered(bench: Bench) -> None:
    await bench.resource()
    await bench.pod("fleet-e0-0", names.engine_labels("fleet", 0), answers=True)
    outcome = await bench.reconcile()
    assert bench.seen == []
    assert outcome.again == pytest.approx(WARM_UP_SECONDS)
    await eventually(lambda: KEY in bench.queued)
    await eventually(lambda: bench.reconciler.agents.settled(KEY))
    await bench.reconcile()
    assert len(bench.seen[0].agents) == 1


async def test_a_new_leader_does_not_wait_for_ever(bench: Bench) -> None:
    await bench.resource()
    await bench.pod("fleet-e0-0", names.engine_labels("fleet", 0), answers=False)
    link_open = await bench.reconcile()
    assert link_open.again is not None
    bench.seconds += WARM_UP_SECONDS
    await bench.reconcile()
    assert bench.seen[0].agents == {}


async def test_a_plan_waits_for_the_end_of_a_burst_of_reports_and_not_for_one_that_does_not_end(bench: Bench) -> None:
    await bench.resource()
    await bench.reconcile()
    loop, agents = asyncio.get_running_loop(), bench.reconciler.agents
    told: list[int] = []

    def report(left: int) -> None:
        agents._changed(KEY)
        told.append(len(bench.seen))
        bench.seconds += 0.01
        if left:
            loop.call_soon(report, left - 1)

    bench.reconciler.bursts.planned(KEY, 0, 0.06)
    report(4)
    await bench.reconcile()
    assert told == [1] * 5, "all before the second plan"
    bench.reconciler.bursts.planned(KEY, 0, 0.06)
    report(60)
    await bench.reconcile()
    assert told[5:].count(2) < 30
    assert len(bench.seen) == 3


async def test_a_pod_that_comes_later_holds_up_nothing(bench: Bench) -> None:
    await bench.resource()
    await bench.reconcile()
    await bench.pod("fleet-e0-0", names.engine_labels("fleet", 0), answers=False)
    await bench.reconcile()
    assert len(bench.seen) == 2


async def test_a_conflict_is_read_and_planned_again_in_the_same_pass(bench: Bench) -> None:
    await bench.resource()
    bench.kube.put(
        ROLLOUT, {**fleets.rollout(replicas=5), "metadata": {**fleets.rollout()["metadata"], "generation": 2}}
    )
    bench.make_plan = lambda observed: fleets.plan(
        fleets.status("x", generation=observed.rollout.metadata.generation), decision=True
    )
    assert await bench.reconcile() == Outcome(None)
    assert [observed.rollout.spec.replicas for observed in bench.seen] == [1, 5]
    assert bench.kube.objects["sglangrollouts", "ns", "fleet"]["status"]["observedGeneration"] == 2


async def test_a_resource_that_is_older_when_it_is_read_again_ends_the_process(bench: Bench) -> None:
    await bench.resource()
    known = bench.rollouts.get(KEY)
    assert known is not None
    newer = {**known.object, "metadata": {**known.object["metadata"], "resourceVersion": "5000"}}
    bench.rollouts.put(newer)
    bench.make_plan = lambda observed: fleets.plan(fleets.status("x"), decision=True)
    with pytest.raises(WentBack):
        await bench.reconcile()


async def test_who_is_deposed_adds_nothing_to_an_external_router(tmp_path: Path) -> None:
    added: list[str] = []

    async def workers(request: web.Request) -> web.Response:
        return web.json_response({"workers": []})

    async def add(request: web.Request) -> web.Response:
        added.append((await request.json())["url"])
        return web.json_response({}, status=202)

    app = web.Application()
    app.router.add_get("/workers", workers)
    app.router.add_post("/workers", add)
    lease = FakeLease()
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        membership = keeper_on(session, lease)(ExternalTarget(str(server.make_url("")), None, KEY))
        desired = RouterDesired(3, "set", [Worker("http://10.0.0.1:30000", "key", "fleet-e0", 1, "1")])
        lease.holds = False
        report = await membership.step(desired)
        assert added == []
        assert "no longer leads" in report.message
        lease.holds = True
        await membership.step(desired)
        assert added == ["http://10.0.0.1:30000"]


async def test_a_resource_that_was_deleted_meanwhile_ends_the_pass(bench: Bench) -> None:
    await bench.resource()
    bench.kube.remove(ROLLOUT, "ns", "fleet")
    assert await bench.reconcile() == Outcome(None)
    assert bench.rollouts.get(KEY) is None


async def test_a_resource_that_cannot_be_read_is_told_by_an_event(bench: Bench) -> None:
    value = fleets.rollout()
    value["spec"]["replicas"] = "many"
    bench.rollouts.put(bench.kube.put(ROLLOUT, value))
    outcome = await bench.reconcile()
    assert outcome.again is not None
    assert bench.seen == []
    writing = asyncio.create_task(bench.reconciler.events.run())
    await bench.reconciler.events.flush()
    writing.cancel()
    (event,) = [value for (plural, _, _), value in bench.kube.objects.items() if plural == "events"]
    assert event["reason"] == "InvalidResource"
    assert "replicas" in event["note"]


async def test_a_deleted_resource_keeps_no_links(bench: Bench) -> None:
    await bench.resource()
    await bench.pod("fleet-e0-0", names.engine_labels("fleet", 0), answers=True)
    await bench.reconcile()
    assert bench.reconciler.agents.of(KEY)
    bench.rollouts.remove(KEY)
    await bench.reconcile()
    assert not bench.reconciler.agents.of(KEY)


@pytest.mark.parametrize(
    ("finalizers", "driven"),
    [(["example.org/backup"], True), (["example.org/backup", "foregroundDeletion"], False), (["orphan"], False)],
)
async def test_a_deleted_resource_that_others_hold_is_driven_until_its_children_go(
    bench: Bench, finalizers: list[str], driven: bool
) -> None:
    await bench.resource()
    await bench.reconcile()
    await bench.pod("fleet-e0-0", names.engine_labels("fleet", 0), answers=False)
    await bench.reconcile()
    value = fleets.rollout()
    deletion = {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": finalizers, "generation": 2}
    value["metadata"] |= deletion
    bench.rollouts.put(bench.kube.put(ROLLOUT, value))
    await bench.reconcile()
    assert bool(bench.reconciler.agents.of(KEY)) is driven
    assert (bench.seen[-1].rollout.metadata.generation == 2) is driven


async def test_a_statefulset_that_cannot_make_pods_says_why(bench: Bench) -> None:
    await bench.resource()
    created = bench.kube.put(STATEFUL_SET, fleets.stateful_set())
    event = {
        "metadata": {"name": "e1", "namespace": "ns"},
        "involvedObject": {"namespace": "ns", "name": "fleet-e0", "uid": created["metadata"]["uid"]},
        "message": "exceeded quota: gpus",
        "lastTimestamp": "2026-01-01T00:00:00Z",
    }
    await eventually(lambda: bench.caches.child("StatefulSet", "ns", "fleet-e0"))
    bench.queued.clear()
    bench.kube.put(CORE_EVENT, event)
    await eventually(lambda: KEY in bench.queued)
    await bench.reconcile()
    assert bench.seen[-1].children["StatefulSet", "fleet-e0"].failure == "exceeded quota: gpus"
    bench.kube.put(STATEFUL_SET, {**created, "status": {"replicas": 1}})
    await eventually(lambda: bench.queued.count(KEY) > 1)
    await bench.reconcile()
    assert bench.seen[-1].children["StatefulSet", "fleet-e0"].failure == ""


async def test_an_external_router_gets_the_planned_workers(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "ns").mkdir()
    (tmp_path / "ns" / "key").write_text("secret\n")
    await bench.resource(router={"external": {"url": "http://router:1", "credential": "key"}})
    desired = RouterDesired(0, "set-1")
    bench.make_plan = lambda observed: fleets.plan(fleets.status("x"), external_router=desired)
    await bench.reconcile()
    await eventually(lambda: bench.external.settled(KEY))
    await bench.reconcile()
    (membership,) = bench.memberships
    assert membership.target.read_credential() == "secret"
    await eventually(lambda: membership.desired[-1] == replace(desired, lease_term=3))
    await eventually(lambda: (report := bench.external.report(KEY)) is not None and report.desired_id == "set-1")
    await bench.reconcile()
    report = bench.seen[-1].external_router
    assert report is not None
    assert report.in_step


async def test_a_router_that_is_left_forgets_the_engines_before_it_counts_as_left(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external_router, "REPAIR_SECONDS", 0.01)
    await bench.resource(router={"external": {"url": "http://router:1"}})
    bench.make_plan = lambda observed: fleets.plan(fleets.status("x"), external_router=RouterDesired(0, "set-1"))
    await bench.reconcile()
    (membership,) = bench.memberships
    await eventually(lambda: membership.desired)
    membership.refuses = "the router is full"
    await bench.resource(router={"replicas": 1})
    await bench.reconcile()
    await eventually(lambda: membership.desired[-1] is not None and membership.desired[-1].workers == [])
    await eventually(lambda: "full" in "".join(bench.external.parting(KEY)))
    await bench.reconcile()
    assert bench.seen[-1].external_untold
    assert bench.seen[-1].parting == ("http://router:1 is to forget the fleet's engines: the router is full",)
    bench.queued.clear()
    membership.refuses = ""
    await eventually(lambda: KEY in bench.queued and not bench.external.parting(KEY))
    await bench.reconcile()
    assert not bench.seen[-1].external_untold


async def test_a_router_that_the_fleet_comes_back_to_keeps_its_engines(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external_router, "REPAIR_SECONDS", 0.01)
    await bench.resource(router={"external": {"url": "http://router:1"}})
    await bench.reconcile()
    first = bench.memberships[0]
    first.refuses = "not now"
    await bench.resource(router={"external": {"url": "http://router:2"}})
    await bench.reconcile()
    assert bench.external.parting(KEY)
    bench.memberships[1].refuses = "not now"
    await bench.resource(router={"external": {"url": "http://router:1"}})
    await bench.reconcile()
    assert [text.split()[0] for text in bench.external.parting(KEY)] == ["http://router:2"]
    await asyncio.sleep(0.05)
    asked = len(first.desired)
    await asyncio.sleep(0.05)
    assert len(first.desired) == asked


async def test_an_operator_that_ends_takes_no_engine_out_of_a_router(bench: Bench) -> None:
    await bench.resource(router={"external": {"url": "http://router:1"}})
    await bench.reconcile()
    (membership,) = bench.memberships
    await eventually(lambda: membership.desired)
    await bench.external.close()
    assert set(membership.desired) == {None}


async def test_a_credential_that_is_not_mounted_is_named(bench: Bench) -> None:
    await bench.resource(router={"external": {"url": "http://router:1", "credential": "key"}})
    await bench.reconcile()
    await eventually(lambda: bench.external.settled(KEY))
    report = bench.external.report(KEY)
    assert report is not None
    assert report.message.startswith("the credential 'key' of router.external cannot be read")
    assert not report.in_step
