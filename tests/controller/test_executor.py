"""The executor's order: a decision before everything, supporting children before pods, then the status, and deletes
last; and what it does when calls fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sglang_rollout.api import WeightsStatus
from sglang_rollout.controller.applies import Applier
from sglang_rollout.controller.caches import Caches
from sglang_rollout.controller.events import EventRecorder
from sglang_rollout.controller.executor import (
    APPLIES_AT_ONCE,
    ExecutionFailed,
    Executor,
    NotLeading,
    Outcome,
    Overtaken,
)
from sglang_rollout.controller.external_router import ExternalRouters
from sglang_rollout.controller.kinds import CONFIG_MAP, POD, ROLLOUT, Object
from sglang_rollout.controller.kube_errors import Conflict, KubeError, Refused, Unreachable
from sglang_rollout.controller.links import LinkContext, LinkPool
from sglang_rollout.controller.pod_calls import Dialect
from sglang_rollout.controller.rollouts import Rollout, Rollouts
from sglang_rollout.controller.status_writes import STILL_SECONDS
from sglang_rollout.controller.tokens import FleetTokens
from sglang_rollout.protocol.desired import AgentDesired, Execution
from sglang_rollout.protocol.report import AgentReport
from sglang_rollout.protocol.routing import RouterDesired, RouterReport
from sglang_rollout.protocol.weights import WeightVersion
from sglang_rollout.transitions.planned import DeleteOrder, EventNote, Plan
from tests.controller import fleets
from tests.controller.fake_kube import FakeKube, eventually
from tests.controller.test_links import FakeLease

KEY = ("ns", "fleet")


def unheard(_: tuple[str, str]) -> None:
    """Nobody works off a queue here."""


class RecordingPool(LinkPool[AgentDesired, AgentReport]):
    """Writes into the API server's list of calls when pods are told, so that the order can be seen."""

    calls: list[tuple[str, str, str]]

    told: dict[str, Any]

    def want(self, fleet: tuple[str, str], desired: Any) -> None:
        self.told = dict(desired)
        if desired:
            self.calls.append(("want", "agents", ""))


@dataclass
class Bench:
    kube: FakeKube
    lease: FakeLease
    executor: Executor
    rollouts: Rollouts
    caches: Caches
    watching: list[asyncio.Task[None]]
    recorded: list[EventNote] = field(default_factory=list)
    seconds: float = 1000.0

    async def execute(self, plan: Plan) -> Outcome:
        rollout = self.rollouts.get(KEY)
        assert rollout is not None
        self.kube.calls.clear()
        return await asyncio.wait_for(self.executor.execute(KEY, rollout, plan), 5)

    def stop_watching(self) -> None:
        for task in self.watching:
            task.cancel()

    async def echoed(self, *plurals: str) -> None:
        """Returns when the caches show these objects as they are."""

        def shown() -> bool:
            return all(
                (entry := self.caches.children[value["kind"]].get((namespace, name))) is not None
                and str(entry.version) == value["metadata"]["resourceVersion"]
                for (plural, namespace, name), value in self.kube.objects.items()
                if plural in plurals
            )

        await eventually(shown)

    def take(self, value: Object) -> None:
        self.rollouts.put(value)

    def status(self) -> Object:
        found: Object = self.kube.objects["sglangrollouts", "ns", "fleet"].get("status") or {}
        return found

    def done(self) -> list[tuple[str, str]]:
        """Writes and orders, without the looks before first applies."""
        return [(verb, resource) for verb, resource, _ in self.kube.calls if verb != "get"]


class Recorder(EventRecorder):
    def __init__(self, notes: list[EventNote]) -> None:
        self.notes = notes

    def record(self, rollout: Object, note: EventNote) -> None:
        self.notes.append(note)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    kube, lease, rollouts = FakeKube(), FakeLease(), Rollouts()
    rollouts.put(kube.put(ROLLOUT, fleets.rollout()))
    notes: list[EventNote] = []
    context = LinkContext(FleetTokens(kube, "ops", "operator"), lease)
    agents = RecordingPool(Dialect("agent", 1, AgentReport, lambda report: report.agent_start), context, unheard)
    agents.calls = kube.calls
    routers: LinkPool[RouterDesired, RouterReport] = LinkPool(
        Dialect("router", 1, RouterReport, lambda report: report.sidecar_start), context, unheard
    )

    def clock() -> float:
        return made.seconds

    caches = Caches(kube, (), unheard)
    executor = Executor(
        kube=kube,
        lease=lease,
        applier=Applier(kube, caches, clock),
        agents=agents,
        routers=routers,
        external=ExternalRouters(lambda target: pytest.fail("no external router"), lease, Path(), unheard),
        events=Recorder(notes),
        on_written=lambda value: made.take(value),
        clock=clock,
    )
    tasks = [asyncio.create_task(informer.run()) for informer in caches.informers]
    made = Bench(kube, lease, executor, rollouts, caches, tasks, notes)
    await caches.synced()
    yield made
    made.stop_watching()
    await asyncio.gather(*tasks, return_exceptions=True)


DESIRED = {"pod-uid": AgentDesired(0, 1, WeightVersion("1", "/m"), Execution())}
NOTE = EventNote("Normal", "Decided", "commit")


async def test_a_decision_is_written_before_anything_else_happens(bench: Bench) -> None:
    await bench.execute(
        fleets.plan(fleets.status("x"), (fleets.config_map(),), agents=DESIRED, decision=True, events=(NOTE,))
    )
    assert bench.done() == [("apply", "sglangrollouts/status"), ("want", "agents"), ("apply", "configmaps")]
    assert bench.recorded == [NOTE]


async def test_without_a_decision_pods_come_first_and_the_status_last(bench: Bench) -> None:
    await bench.execute(fleets.plan(fleets.status("x"), (fleets.config_map(),), agents=DESIRED))
    assert bench.done() == [("want", "agents"), ("apply", "configmaps"), ("apply", "sglangrollouts/status")]


async def test_while_engines_stand_still_children_are_looked_at_rarely(bench: Bench) -> None:
    still = fleets.status("x").model_copy(update={"weights": WeightsStatus(phase="Committing")})
    await bench.execute(fleets.plan(still, (fleets.config_map(),), agents=DESIRED))
    assert ("apply", "configmaps") in bench.done()
    plan = fleets.plan(still, (fleets.config_map(), fleets.config_map("other")), agents=DESIRED)
    outcome = await bench.execute(plan)
    assert bench.done() == [("want", "agents")]
    assert outcome.again == STILL_SECONDS
    bench.seconds += STILL_SECONDS
    await bench.execute(plan)
    assert ("apply", "configmaps") in bench.done()


async def test_while_engines_stand_still_only_orders_are_worked_out(bench: Bench) -> None:
    still = fleets.status("x").model_copy(update={"weights": WeightsStatus(phase="Committing")})
    await bench.execute(fleets.plan(still, agents=DESIRED, decision=True, events=(NOTE,)))
    assert bench.recorded == [NOTE]
    plan = Plan(lambda: pytest.fail("nobody waits for it"), phase="Committing", agents=DESIRED)
    assert (await bench.execute(plan)).again == STILL_SECONDS
    assert bench.done() == [("want", "agents")]
    await bench.execute(fleets.plan(fleets.status("y"), agents=DESIRED))
    assert bench.done() == [("want", "agents"), ("apply", "sglangrollouts/status")], "the move is over"


async def test_an_overtaken_decision_does_nothing(bench: Bench) -> None:
    bench.kube.put(ROLLOUT, fleets.rollout(replicas=2))
    plan = fleets.plan(fleets.status("x"), (fleets.config_map(),), agents=DESIRED, decision=True, events=(NOTE,))
    with pytest.raises(Overtaken):
        await bench.execute(plan)
    assert bench.done() == [("apply", "sglangrollouts/status")]
    assert bench.recorded == []
    assert bench.status() == {}


async def test_no_status_is_ever_written_over_a_newer_resource(bench: Bench) -> None:
    """A whole status holds the decision too: a deposed operator must not undo its successor's."""
    bench.kube.put(ROLLOUT, {**fleets.rollout(), "status": {"observedGeneration": 7}})
    with pytest.raises(Overtaken):
        await bench.execute(fleets.plan(fleets.status("x"), agents=DESIRED))
    assert bench.status() == {"observedGeneration": 7}


async def test_a_failed_decision_write_does_nothing_else(bench: Bench) -> None:
    bench.kube.fail = lambda verb, plural, _: Unreachable("down") if plural == "sglangrollouts/status" else None
    with pytest.raises(Unreachable):
        await bench.execute(fleets.plan(fleets.status("x"), (fleets.config_map(),), agents=DESIRED, decision=True))
    assert bench.done() == [("apply", "sglangrollouts/status")]


async def test_what_pods_need_is_there_before_them(bench: Bench) -> None:
    await bench.execute(fleets.plan(fleets.status("x"), (fleets.stateful_set(), fleets.config_map())))
    assert bench.done()[:2] == [("apply", "configmaps"), ("apply", "statefulsets")]


async def test_an_unchanged_plan_calls_nothing(bench: Bench) -> None:
    plan = fleets.plan(fleets.status("x"), (fleets.config_map(), fleets.stateful_set()))
    await bench.execute(plan)
    await bench.echoed("configmaps", "statefulsets")
    assert await bench.execute(plan) == Outcome(None)
    assert bench.kube.calls == []


async def test_a_cache_that_is_late_is_no_reason_to_apply_again(bench: Bench) -> None:
    plan = fleets.plan(fleets.status("x"), (fleets.config_map(),))
    bench.stop_watching()
    await bench.execute(plan)
    assert (await bench.execute(plan)).again == pytest.approx(10.0)
    assert bench.kube.calls == []
    bench.seconds += 10
    await bench.execute(plan)
    assert bench.done() == [("apply", "configmaps")]


async def test_a_child_that_was_deleted_is_made_again_at_once(bench: Bench) -> None:
    plan = fleets.plan(fleets.status("x"), (fleets.config_map(),))
    await bench.execute(plan)
    await bench.echoed("configmaps")
    await bench.execute(plan)
    bench.kube.remove(CONFIG_MAP, "ns", "fleet-fleet")
    await eventually(lambda: bench.caches.child("ConfigMap", "ns", "fleet-fleet") is None)
    await bench.execute(plan)
    assert bench.done() == [("apply", "configmaps")]


async def test_a_change_by_somebody_else_is_undone(bench: Bench) -> None:
    plan = fleets.plan(fleets.status("x"), (fleets.config_map(),))
    await bench.execute(plan)
    value = bench.kube.objects["configmaps", "ns", "fleet-fleet"]
    bench.kube.put(CONFIG_MAP, {**value, "data": {"value": "hacked"}})
    await eventually(lambda: bench.executor.applier.is_due(fleets.config_map()))
    await bench.execute(plan)
    assert bench.kube.objects["configmaps", "ns", "fleet-fleet"]["data"] == {"value": "1"}


async def test_an_object_of_somebody_else_is_not_taken_over(bench: Bench) -> None:
    foreign = fleets.config_map(owner="somebody")
    foreign["metadata"]["labels"] = {}
    bench.kube.put(CONFIG_MAP, foreign)
    outcome = await bench.execute(fleets.plan(fleets.status("x"), (fleets.config_map(value="ours"),)))
    assert bench.kube.objects["configmaps", "ns", "fleet-fleet"]["data"] == {"value": "1"}
    sentence = bench.executor.apply_errors(KEY)["ConfigMap", "fleet-fleet"]
    assert sentence == "ConfigMap fleet-fleet belongs to another owner: delete or rename it"
    assert outcome == Outcome(0.0), "the status must tell it at once"


async def test_a_refused_child_is_told_and_not_tried_again_at_once(bench: Bench) -> None:
    def refuse(verb: str, plural: str, _: str) -> KubeError | None:
        return Refused("spec.replicas: Invalid value", 422) if plural == "statefulsets" and verb == "apply" else None

    bench.kube.fail = refuse
    plan = fleets.plan(fleets.status("x"), (fleets.stateful_set(), fleets.config_map()))
    await bench.execute(plan)
    assert bench.executor.apply_errors(KEY) == {("StatefulSet", "fleet-e0"): "spec.replicas: Invalid value"}
    outcome = await bench.execute(plan)
    assert bench.kube.calls == []
    assert outcome.again == pytest.approx(10.0)
    bench.kube.fail = lambda *_: None
    bench.seconds += 10
    await bench.execute(plan)
    assert bench.executor.apply_errors(KEY) == {}


async def test_failures_are_joined_and_the_status_is_written_all_the_same(bench: Bench) -> None:
    def fail(verb: str, plural: str, name: str) -> KubeError | None:
        return Unreachable(f"{name} down") if verb == "apply" and plural == "configmaps" else None

    bench.kube.fail = fail
    children = (fleets.config_map("a"), fleets.config_map("b"), fleets.stateful_set())
    with pytest.raises(ExecutionFailed, match="a down; b down") as raised:
        await bench.execute(fleets.plan(fleets.status("x"), children, requeue_after=3.0))
    assert raised.value.again == 3.0
    assert ("statefulsets", "ns", "fleet-e0") in bench.kube.objects
    assert bench.status()["observedGeneration"] == 1


async def test_only_the_object_that_was_meant_is_deleted(bench: Bench) -> None:
    pod = bench.kube.put(POD, {"metadata": {"name": "fleet-e0-0", "namespace": "ns"}})
    await bench.execute(fleets.plan(fleets.status("x"), deletes=(DeleteOrder("Pod", "fleet-e0-0", "another"),)))
    assert ("pods", "ns", "fleet-e0-0") in bench.kube.objects
    order = DeleteOrder("Pod", "fleet-e0-0", pod["metadata"]["uid"])
    await bench.execute(fleets.plan(fleets.status("x"), deletes=(order,)))
    assert ("pods", "ns", "fleet-e0-0") not in bench.kube.objects
    await bench.execute(fleets.plan(fleets.status("x"), deletes=(order,)))
    assert bench.kube.calls == []


@pytest.mark.parametrize("problem", [Unreachable("down"), Conflict("modified")])
async def test_nothing_is_deleted_that_the_status_does_not_count_yet(bench: Bench, problem: KubeError) -> None:
    pod = bench.kube.put(POD, {"metadata": {"name": "fleet-e0-0", "namespace": "ns"}})
    order = DeleteOrder("Pod", "fleet-e0-0", pod["metadata"]["uid"])
    recreated = fleets.plan(fleets.status("x"), deletes=(order,), events=(NOTE,))
    bench.kube.fail = lambda verb, plural, _: problem if plural == "sglangrollouts/status" else None
    with pytest.raises((ExecutionFailed, Overtaken)):
        await bench.execute(recreated)
    assert bench.done() == [("apply", "sglangrollouts/status")]
    bench.kube.fail = lambda *_: None
    await bench.execute(recreated)
    assert bench.done() == [("apply", "sglangrollouts/status"), ("delete", "pods")]


async def test_what_was_counted_is_done_also_while_engines_stand_still(bench: Bench) -> None:
    """By another count it would be done only after a back-off, and counted again."""
    pod = bench.kube.put(POD, {"metadata": {"name": "fleet-e0-0", "namespace": "ns"}})
    still = fleets.status("x").model_copy(update={"weights": WeightsStatus(phase="Committing")})
    order = DeleteOrder("Pod", "fleet-e0-0", pod["metadata"]["uid"])
    await bench.execute(fleets.plan(still, deletes=(order,), events=(NOTE,), decision=True))
    assert bench.done() == [("apply", "sglangrollouts/status"), ("delete", "pods")]


async def test_who_does_not_lead_writes_nothing(bench: Bench) -> None:
    bench.lease.holds = False
    for decision in (True, False):
        with pytest.raises(NotLeading):
            await bench.execute(
                fleets.plan(fleets.status("x"), (fleets.config_map(),), agents=DESIRED, decision=decision)
            )
        assert bench.kube.calls == []


async def test_losing_the_lease_in_the_middle_stops_what_is_left(bench: Bench) -> None:
    def lose(verb: str, plural: str, _: str) -> None:
        if plural == "configmaps":
            bench.lease.holds = False

    bench.kube.fail = lose
    with pytest.raises(NotLeading):
        await bench.execute(fleets.plan(fleets.status("x"), (fleets.config_map(), fleets.stateful_set())))
    assert ("apply", "statefulsets") not in bench.done()
    assert bench.status() == {}


async def test_a_large_fleet_is_made_in_passes(bench: Bench) -> None:
    many = tuple(fleets.stateful_set(f"fleet-e{index}") for index in range(APPLIES_AT_ONCE + 5))
    assert (await bench.execute(fleets.plan(fleets.status("x"), many))).again == 0.0
    assert len([call for call in bench.kube.calls if call[0] == "apply"]) == APPLIES_AT_ONCE + 1
    await bench.echoed("statefulsets")
    assert (await bench.execute(fleets.plan(fleets.status("x"), many))).again == pytest.approx(10.0)
    assert len([call for call in bench.kube.calls if call[0] == "apply"]) == 5


async def test_quiet_changes_of_the_status_wait_a_moment(bench: Bench) -> None:
    await bench.execute(fleets.plan(fleets.status("one")))
    outcome = await bench.execute(fleets.plan(fleets.status("two", routable=3)))
    assert bench.kube.calls == []
    assert outcome.again == pytest.approx(0.25)
    bench.seconds += 0.25
    await bench.execute(fleets.plan(fleets.status("two", routable=3)))
    assert bench.status()["routableReplicas"] == 3


async def test_a_condition_that_flips_is_told_at_once(bench: Bench) -> None:
    await bench.execute(fleets.plan(fleets.status("one")))
    await bench.execute(fleets.plan(fleets.status("two", ready=True)))
    assert bench.status()["conditions"][0]["status"] == "True"


async def test_the_planned_time_comes_back(bench: Bench) -> None:
    assert await bench.execute(fleets.plan(fleets.status("x"), requeue_after=7.0)) == Outcome(7.0)


def test_a_rollout_is_parsed_once() -> None:
    value = Rollout(fleets.rollout())
    assert value.model is value.model


async def test_agents_of_a_fleet_have_one_key_for_each_other_that_no_other_fleet_has(bench: Bench) -> None:
    one = bench.executor.peer_key(Rollout(fleets.rollout()))
    assert one == bench.executor.peer_key(Rollout(fleets.rollout(replicas=2)))
    assert len(one) == 64
    other = fleets.rollout()
    other["metadata"]["uid"] = "uid-other"
    assert bench.executor.peer_key(Rollout(other)) != one
