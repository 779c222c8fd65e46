"""The three things that never happen, and convergence, over random schedules of steps, faults and spec changes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_rollout.api import Condition, SGLangRollout, find_condition
from sglang_rollout.protocol.weights import WeightMove
from sglang_rollout.transitions.engines import view_engines
from sglang_rollout.transitions.observed import ChildView
from sglang_rollout.transitions.plan import _coming, plan

from .simulation import SimPod, Simulation

# More of them find rarer schedules: EXAMPLES=2000 for a long look.
EXAMPLES = int(os.environ.get("EXAMPLES", "40"))


def disk(version: str, path: str | None = None, **more: Any) -> dict[str, Any]:
    return {"version": version, "source": {"type": "Disk", "disk": {"path": path or f"/models/v{version}"}}, **more}


def test_a_new_fleet_becomes_ready() -> None:
    fleet = Simulation()
    fleet.settle()
    assert fleet.condition("Ready").status == "True"
    assert fleet.serving() == {"f-e0-0": "default", "f-e1-0": "default"}


def test_ready_waits_for_what_kubernetes_says_of_the_pods() -> None:
    fleet = Simulation()
    fleet.settle()
    seen = fleet.observe()
    behind = tuple(replace(pod, ready=False) if pod.name == "f-e1-0" else pod for pod in seen.pods)
    ready = find_condition(plan(replace(seen, pods=behind), fleet.now).status.conditions, "Ready")
    assert ready is not None
    assert (ready.status, ready.reason) == ("False", "PodsNotReady")


def test_a_version_switch_reaches_every_engine() -> None:
    fleet = Simulation()
    fleet.settle()
    fleet.patch(weights=disk("2"))
    fleet.settle()
    assert fleet.serving() == {"f-e0-0": "2", "f-e1-0": "2"}
    assert fleet.boot.version == "2"
    assert [entry.version for entry in fleet.weights.history] == ["default", "2"]
    assert fleet.condition("Ready").status == "True"


@pytest.mark.parametrize("seconds", [0.01, 0.3, 1.0])
@pytest.mark.parametrize("slow", ["f-e0-0", "f-e1-0"])
@pytest.mark.parametrize("source", ["Disk", "Staged"])
def test_no_router_loses_an_engine_that_comes_through_a_move(source: str, slow: str, seconds: float) -> None:
    """However late the status is written, and whoever is last to apply and to go on."""
    fleet = Simulation()
    fleet.settle()
    fleet.trainers.add("2")
    fleet.patch(weights=disk("2") if source == "Disk" else sent("2"))
    every = {f"http://{pod.ip}:30000" for pod in fleet.pods.values() if pod.engine_index is not None}
    for turn in range(200):
        fleet.reconcile()
        for uid, pod in list(fleet.pods.items()):
            fleet.hear(uid)
            if pod.name != slow or turn % 5 == 0:
                fleet.run_pod(uid)
            fleet.deliver(uid)
            if pod.router_orders is not None:
                assert {worker.url for worker in pod.router_orders.workers} == every
        fleet.now += timedelta(seconds=seconds)
    assert fleet.serving() == {"f-e0-0": "2", "f-e1-0": "2"}


def test_a_patch_leaves_an_engine_in_the_routers_that_has_just_come_into_them() -> None:
    """Though no status tells yet that it has, and its agent has not heard of the patch."""
    fleet = Simulation()
    fleet.settle()
    fleet.kill_engine(next(pod.uid for pod in fleet.pods.values() if pod.name == "f-e1-0"))
    for _ in range(8):
        fleet.reconcile(status_write_fails=True)
        for uid in list(fleet.pods):
            fleet.hear(uid)
            fleet.run_pod(uid)
            fleet.deliver(uid)
    assert len(fleet.serving()) == 2
    fleet.patch(restartPolicy={"maxRestarts": 9})
    fleet.reconcile()
    ordered = [pod.router_orders for pod in fleet.pods.values() if pod.engine_index is None]
    assert [len(order.workers) for order in ordered if order] == [2]


def test_a_refused_checkpoint_leaves_the_old_version_serving_and_says_why() -> None:
    fleet = Simulation()
    fleet.settle()
    fleet.bad_paths.add("/models/v2")
    fleet.patch(weights=disk("2"))
    fleet.settle()
    assert fleet.serving() == {"f-e0-0": "default", "f-e1-0": "default"}
    ready = fleet.condition("Ready")
    assert (ready.status, ready.reason) == ("False", "WeightsRefused")
    assert "tensor x has another shape" in ready.message
    assert "f-e0-0" in ready.message
    fleet.bad_paths.clear()
    fleet.settle()
    assert fleet.serving() == {"f-e0-0": "2", "f-e1-0": "2"}


def test_a_label_that_was_used_for_other_weights_is_refused() -> None:
    fleet = Simulation()
    fleet.settle()
    fleet.patch(weights=disk("2"))
    fleet.settle()
    fleet.patch(weights=disk("3"))
    fleet.settle()
    fleet.patch(weights=disk("2", "/models/other"))
    fleet.settle()
    assert set(fleet.serving().values()) == {"3"}
    assert "give /models/other a label of its own" in fleet.condition("Degraded").message
    fleet.patch(weights=disk("2"))
    fleet.settle()
    assert set(fleet.serving().values()) == {"2"}


def test_going_back_before_the_decision_gives_the_move_up() -> None:
    fleet = Simulation()
    fleet.settle()
    fleet.patch(weights=disk("2"))
    fleet.reconcile()
    fleet.patch(weights={})
    fleet.settle()
    assert fleet.serving() == {"f-e0-0": "default", "f-e1-0": "default"}
    assert fleet.condition("Ready").status == "True"


def test_an_engine_that_fails_in_mid_commit_is_restarted_at_the_new_version() -> None:
    fleet = Simulation()
    fleet.settle()
    fleet.break_next_apply = True
    fleet.patch(weights=disk("2"))
    fleet.settle(120)
    assert fleet.serving() == {"f-e0-0": "2", "f-e1-0": "2"}


@pytest.mark.parametrize("policy", ["RestartEngine", "KeepGated"])
@pytest.mark.parametrize("source", ["Disk", "Staged"])
def test_an_engine_whose_checksum_differs_never_serves_it_and_is_told(source: str, policy: str) -> None:
    fleet = Simulation(replicas=3)
    fleet.settle()
    fleet.odd_sums.add("f-e1-0")
    fleet.trainers.add("2")
    more = {"verify": "Checksum", "failurePolicy": policy}
    fleet.patch(weights={**(disk("2") if source == "Disk" else sent("2")), **more})
    told = set()
    for _ in range(120):
        fleet.settle(1)
        assert "mixed" not in fleet.serving().values()
        told.add(fleet.condition("Degraded").message)
    assert "engine f-e1: its weights have checksum" in " ".join(told)
    assert fleet.events.count("WeightsDiffer") == 1
    assert fleet.serving() == {"f-e0-0": "2", "f-e1-0": "2", "f-e2-0": "2"}
    assert fleet.condition("Ready").status == "True"


@pytest.mark.parametrize("odd", ["f-e0-0", "f-e1-0"])
@pytest.mark.parametrize("strategy", ["AllAtOnce", "Rolling"])
def test_of_two_engines_with_different_checksums_neither_serves_on(strategy: str, odd: str) -> None:
    """Whichever of the two sums is the greater: nobody can tell which one is right."""
    fleet = Simulation()
    fleet.settle()
    fleet.odd_sums.add(odd)
    fleet.patch(weights=disk("2", verify="Checksum", updateStrategy={"type": strategy}))
    before = {pod.name: pod.engine.start_id for pod in fleet.pods.values() if pod.engine}
    told = set()
    for _ in range(60):
        fleet.settle(1)
        told.add(fleet.condition("Degraded").message)
    after = {pod.name: pod.engine.start_id for pod in fleet.pods.values() if pod.engine}
    assert {name for name in after if after[name] != before[name]} == set(before)
    assert not any(pod.engine.wrong for pod in fleet.pods.values() if pod.engine)
    assert fleet.events.count("WeightsDiffer") == 2
    assert "none is that of most" in " ".join(told)
    assert set(fleet.serving().values()) == {"2"}
    assert fleet.condition("Ready").status == "True"


def test_an_engine_that_is_kept_gated_says_what_to_do_and_is_repaired_by_another_version() -> None:
    kept = {"failurePolicy": "KeepGated"}
    fleet = Simulation(weights=kept)
    fleet.settle()
    fleet.break_next_apply = True
    fleet.patch(weights=disk("2", **kept))
    fleet.settle(120)
    assert list(fleet.serving().values()) == ["2"]
    fleet.bad_paths.add("/models/vBad")
    fleet.patch(weights=disk("Bad", **kept))
    fleet.settle(120)
    assert list(fleet.serving().values()) == ["2"], "it is kept as it is"
    fleet.patch(weights=disk("2", **kept))
    fleet.settle(20)
    (gated,) = [engine for engine in fleet.rollout.status.engines if not engine.routable]
    for told in (gated.message, fleet.condition("Degraded").message, fleet.condition("Ready").message):
        assert "move the fleet to another weights.version" in told
    start = next(pod.engine.start_id for pod in fleet.pods.values() if pod.name == f"{gated.name}-0" and pod.engine)
    fleet.patch(weights=disk("3", **kept))
    fleet.settle(60)
    assert fleet.serving() == {"f-e0-0": "3", "f-e1-0": "3"}
    assert start in {pod.engine.start_id for pod in fleet.pods.values() if pod.engine}, "the same process"
    assert fleet.condition("Ready").status == "True"


@pytest.mark.parametrize("nodes", [1, 2])
def test_an_engine_on_a_lost_node_is_replaced_under_a_new_index(nodes: int) -> None:
    fleet = Simulation(engine={"image": "i", "nodes": nodes, "tensorParallelSize": nodes})
    fleet.settle()
    fleet.lose_node_of(next(p.uid for p in fleet.pods.values() if p.name == f"f-e0-{nodes - 1}"))
    fleet.settle(10)
    assert set(fleet.serving()) == {"f-e1-0"}
    assert set(fleet.stateful_sets) == {"f-e0", "f-e1"}, "a pod that ends slowly is no lost node"
    fleet.settle(200)
    assert set(fleet.serving()) == {"f-e1-0", "f-e2-0"}
    assert set(fleet.stateful_sets) == {"f-e1", "f-e2"}
    assert "EngineReplaced" in fleet.events
    assert fleet.condition("Ready").status == "True"
    assert fleet.condition("Degraded").reason == "PodNotEnding"
    fleet.return_nodes()
    fleet.settle()
    assert fleet.condition("Degraded").status == "False"
    assert set(fleet.serving()) == {"f-e1-0", "f-e2-0"}, "a replacement stays"
    assert fleet.condition("Ready").status == "True"
    fleet.patch(replicas=1)
    fleet.settle()
    assert set(fleet.serving()) == {"f-e1-0"}


@pytest.mark.parametrize("nodes", [1, 2])
def test_losing_any_pod_recreates_the_whole_group(nodes: int) -> None:
    for rank in range(nodes):
        engine = {"image": "i", "nodes": nodes, "tensorParallelSize": nodes}
        fleet = Simulation(replicas=1, engine=engine)
        fleet.settle()
        before = {pod.uid for pod in fleet.pods.values() if pod.engine_index == 0}
        fleet.delete_pod(next(p.uid for p in fleet.pods.values() if p.engine_index == 0 and p.rank == rank))
        fleet.settle()
        after = {pod.uid for pod in fleet.pods.values() if pod.engine_index == 0}
        assert len(after) == nodes
        assert not before & after
        assert fleet.rollout.status.engines[0].incarnation == 2
        assert fleet.condition("Ready").status == "True"


def test_scaling_down_takes_the_engine_out_of_the_router_first() -> None:
    fleet = Simulation(replicas=3)
    fleet.settle()
    fleet.patch(replicas=1)
    fleet.reconcile()
    assert set(fleet.stateful_sets) == {"f-e0", "f-e1", "f-e2"}
    fleet.settle()
    assert set(fleet.stateful_sets) == {"f-e0"}
    assert fleet.serving() == {"f-e0-0": "default"}


def test_a_changed_spec_replaces_pods_a_few_engines_at_a_time() -> None:
    fleet = Simulation(replicas=3)
    fleet.settle()
    old = {pod.uid for pod in fleet.pods.values() if pod.engine_index is not None}
    fleet.patch(engine={"image": "sglang:2"})
    for _ in range(60):
        fleet.settle(1)
        assert len(fleet.serving()) >= 2
    assert not old & set(fleet.pods)
    assert fleet.condition("Ready").status == "True"


def test_an_engine_whose_move_was_given_up_takes_no_part_in_it() -> None:
    """A leader with an old view may have told it so; the others do not wait for it until the deadline."""
    fleet = Simulation()
    fleet.settle()
    fleet.patch(weights=disk("2"))
    while fleet.weights.transaction is None or fleet.weights.transaction.decision is None:
        fleet.settle(1)
    engine = next(pod for pod in fleet.pods.values() if pod.engine_index == 0)
    assert engine.move is not None
    engine.move = replace(engine.move, aborted=True)
    fleet.settle(20)
    assert fleet.serving() == {"f-e0-0": "2", "f-e1-0": "2"}


def test_an_engine_that_is_not_wanted_any_more_comes_through_the_move_first() -> None:
    fleet = Simulation(replicas=2)
    fleet.settle()
    fleet.patch(weights=disk("2"))
    while not any(pod.engine and pod.engine.paused for pod in fleet.pods.values()):
        fleet.settle(1)
    fleet.patch(replicas=1)
    parting = next(pod for pod in fleet.pods.values() if pod.engine_index == 1)
    seen: set[str] = set()
    for _ in range(20):
        fleet.settle(1)
        assert_truth(fleet, rolling=False)
        if parting.uid in fleet.pods and parting.engine and not parting.engine.paused:
            seen.add(parting.engine.bytes_version)
    assert seen == {"2"}, "what waited at it was served by the weights that all serve"
    assert set(fleet.stateful_sets) == {"f-e0"}


def test_an_engine_that_is_not_wanted_and_takes_no_part_is_out_of_the_routers_first() -> None:
    fleet = Simulation(replicas=2)
    fleet.settle()
    fleet.patch(weights=disk("2"))
    while fleet.weights.transaction is None or fleet.weights.transaction.decision is None:
        fleet.settle(1)
    parting = next(pod for pod in fleet.pods.values() if pod.engine_index == 1)
    router = next(pod for pod in fleet.pods.values() if pod.engine_index is None)
    fleet.restart_agent(parting.uid)
    fleet.lose_stage(parting.uid)
    fleet.bad_paths.add("/models/v2")  # now it is gone: this engine cannot prepare it again
    fleet.patch(replicas=1)
    for _ in range(20):
        fleet.reconcile()
        for uid in list(fleet.pods):
            if uid != router.uid:
                fleet.hear(uid)
            fleet.run_pod(uid)
            fleet.deliver(uid)
        assert_truth(fleet, rolling=False)
    assert fleet.weights.version == "default"
    fleet.settle(20)
    assert fleet.serving() == {"f-e0-0": "2"}


def test_a_router_pod_that_is_ending_is_told_and_waited_for_as_well() -> None:
    """It goes on serving connections of before: an engine that misses the barrier must be out of it, too."""
    fleet = Simulation(router={"replicas": 2})
    fleet.settle()
    ending = next(pod for pod in fleet.pods.values() if pod.engine_index is None)
    late = next(pod for pod in fleet.pods.values() if pod.engine_index == 0)
    fleet.patch(weights=disk("2"))
    while fleet.weights.transaction is None or fleet.weights.transaction.decision is None:
        fleet.settle(1)
    fleet.delete_pod(ending.uid)
    fleet.restart_agent(late.uid)
    fleet.lose_stage(late.uid)
    fleet.bad_paths.add("/models/v2")  # now it is gone: this engine cannot prepare it again
    for _ in range(40):
        fleet.reconcile()
        fleet.run_kubernetes(lambda: False)
        for uid in list(fleet.pods):
            if uid != ending.uid:
                fleet.hear(uid)
            fleet.run_pod(uid)
            fleet.deliver(uid)
        assert_truth(fleet, rolling=False)
        fleet.now += timedelta(seconds=1)
    assert fleet.weights.version == "default", "the others wait while the ending router may send requests to it"
    assert "waiting until no router has f-e0" in (
        fleet.weights.transaction.message if fleet.weights.transaction else ""
    )
    fleet.settle(10)
    assert fleet.weights.version == "2"


def rounds_without(fleet: Simulation, deaf: SimPod, rounds: int = 12, seconds: float = 1.0) -> None:
    """Everything moves but pods come and go; `deaf` hears no new orders, and goes on reporting."""
    for _ in range(rounds):
        fleet.reconcile()
        for uid in list(fleet.pods):
            if uid != deaf.uid:
                fleet.hear(uid)
            fleet.run_pod(uid)
            fleet.deliver(uid)
        assert_truth(fleet, rolling=False)
        fleet.now += timedelta(seconds=seconds)


def until_paused(fleet: Simulation) -> None:
    while not all(pod.engine.paused for pod in fleet.pods.values() if pod.engine):
        fleet.settle(1)


@pytest.mark.parametrize("patch", [{"engine": {"image": "sglang:2"}}, {"memory": {"weightsBackup": "HostMemory"}}])
def test_an_engine_is_replaced_or_restarted_only_when_no_router_has_it(patch: dict[str, Any]) -> None:
    fleet = Simulation()
    fleet.settle()
    before = {pod.uid: pod.engine.start_id for pod in fleet.pods.values() if pod.engine}
    fleet.patch(**patch)
    rounds_without(fleet, next(pod for pod in fleet.pods.values() if pod.engine_index is None))
    assert not any(pod.terminating for pod in fleet.pods.values())
    assert {pod.uid: pod.engine.start_id for pod in fleet.pods.values() if pod.engine} == before
    fleet.settle()
    assert not {pod.engine.start_id for pod in fleet.pods.values() if pod.engine} & set(before.values())
    assert fleet.condition("Ready").status == "True"


def test_an_engine_is_not_drained_in_the_middle_of_a_move() -> None:
    fleet = Simulation()
    fleet.settle()
    fleet.patch(weights=disk("2"))
    until_paused(fleet)
    fleet.patch(engine={"image": "sglang:2"})
    fleet.reconcile()
    orders = [pod.orders for pod in fleet.pods.values() if pod.engine_index is not None]
    assert not any(order.drain for order in orders if order)
    assert all(order.move for order in orders if order)
    fleet.settle()
    assert fleet.serving() == {"f-e0-0": "2", "f-e1-0": "2"}


def test_who_does_not_apply_in_time_is_out_of_the_routers_before_the_others_go_on() -> None:
    fleet = Simulation()
    fleet.settle()
    fleet.patch(weights=disk("2"))
    until_paused(fleet)
    late = next(pod for pod in fleet.pods.values() if pod.engine_index == 1)
    rounds_without(fleet, late, seconds=30.0)
    assert fleet.weights.version == "default", "the others wait for it until the deadline"
    rounds_without(fleet, late, rounds=20, seconds=60.0)
    assert fleet.serving() == {"f-e0-0": "2"}
    routers = [pod for pod in fleet.pods.values() if pod.engine_index is None]
    assert all(worker.engine != "f-e1" for router in routers for worker in router.router_workers.values())
    fleet.settle()
    assert fleet.serving() == {"f-e0-0": "2", "f-e1-0": "2"}


def test_changes_of_other_things_do_not_hold_up_a_move() -> None:
    fleet = Simulation()
    fleet.settle()
    fleet.patch(weights=disk("2"))
    for state in ("Paused", "Running") * 10:
        fleet.patch(execution={"state": state})
        fleet.settle(1)
    assert fleet.weights.version == "2"


def test_a_router_of_an_older_spec_is_not_ready() -> None:
    fleet = Simulation()
    fleet.settle()
    fleet.patch(router={"replicas": 2})
    fleet.reconcile()
    for uid in fleet.pods:
        fleet.hear(uid)
        fleet.deliver(uid)
    fleet.reconcile()
    ready = fleet.condition("Ready")
    assert (ready.status, ready.reason) == ("False", "RouterStarting")
    assert "1 of 2 router pods are ready" in ready.message
    fleet.settle()
    assert fleet.condition("Ready").status == "True"
    next(pod for pod in fleet.pods.values() if pod.engine_index is None).spec_hash = "older"
    fleet.reconcile()
    assert "1 router pods are of an older spec" in fleet.condition("Ready").message


def test_an_external_router_takes_the_place_of_the_own_one() -> None:
    fleet = Simulation()
    fleet.settle()
    own = ChildView("Deployment", "f-router", "d1", "u1")
    foreign = ChildView("Service", "f-router", "s1", "somebody")
    fleet.patch(router={"external": {"url": "http://router:1"}})
    observed = fleet.observe()
    children = {**observed.children, ("Deployment", "f-router"): own, ("Service", "f-router"): foreign}
    step = plan(replace(observed, children=children), fleet.now)
    assert [(order.kind, order.name) for order in step.deletes] == [("Deployment", "f-router")]
    assert set(step.routers) == {pod.uid for pod in fleet.pods.values() if pod.engine_index is None}, "told to the end"


def test_paused_is_ready_and_says_so() -> None:
    fleet = Simulation()
    fleet.settle()
    fleet.patch(execution={"state": "Paused"})
    fleet.settle()
    assert fleet.serving() == {}
    assert (fleet.condition("Ready").status, fleet.condition("Ready").reason) == ("True", "Paused")
    assert fleet.rollout.status.execution_state == "Paused"
    fleet.patch(execution={"state": "Running"})
    fleet.settle()
    assert len(fleet.serving()) == 2


ALL_RELEASED = {"weights": "Released", "kvCache": "Released", "cudaGraph": "Released", "weightsBackup": "HostMemory"}


@pytest.mark.parametrize("backup", ["None", "HostMemory"])
def test_memory_is_released_and_comes_back_with_whole_weights(backup: str) -> None:
    fleet = Simulation(weights=disk("2"))
    fleet.settle()
    starts = {pod.engine.start_id for pod in fleet.pods.values() if pod.engine}
    fleet.patch(execution={"state": "Paused"}, memory={**ALL_RELEASED, "weightsBackup": backup})
    fleet.settle()
    assert fleet.serving() == {}
    assert (fleet.condition("Ready").status, fleet.condition("Ready").reason) == ("True", "MemoryReleased")
    status = fleet.rollout.status.memory
    assert status is not None
    assert (status.weights, status.kv_cache, status.cuda_graph) == ("Released",) * 3
    assert not starts & {pod.engine.start_id for pod in fleet.pods.values() if pod.engine}, "flags need a new process"
    fleet.patch(execution={"state": "Running"}, memory={})
    fleet.settle()
    assert fleet.serving() == {"f-e0-0": "2", "f-e1-0": "2"}
    assert fleet.condition("Ready").status == "True"
    restarts = fleet.events.count("EngineRestarting")
    fleet.patch(execution={"state": "Paused"}, memory={**ALL_RELEASED, "weightsBackup": backup})
    fleet.settle()
    assert fleet.events.count("EngineRestarting") == restarts, "flags once given stay"


def test_a_version_that_comes_while_memory_is_released_is_served_after_it() -> None:
    fleet = Simulation(weights=disk("2"))
    fleet.settle()
    fleet.patch(execution={"state": "Paused"}, memory={**ALL_RELEASED, "weightsBackup": "None"})
    fleet.settle()
    fleet.patch(weights=disk("3"))
    fleet.settle()
    assert fleet.weights.version == "3"
    fleet.patch(execution={"state": "Running"}, memory={})
    fleet.settle()
    assert fleet.serving() == {"f-e0-0": "3", "f-e1-0": "3"}


@pytest.mark.parametrize("action", ["Snapshot", "Checksum", "Compare", "Reset"])
def test_a_check_is_done_once_on_every_engine_and_told(action: str) -> None:
    fleet = Simulation(weights=disk("2"))
    fleet.settle()
    fleet.patch(weightCheck={"requestID": "7", "action": action})
    fleet.settle()
    check = fleet.rollout.status.last_weight_check
    assert check is not None
    assert (check.request_id, check.result, check.weight_version) == ("7", "Passed", "2")
    assert [operation for _, operation in fleet.done_operations] == ["check:7", "check:7"]
    assert fleet.serving() == {"f-e0-0": "2", "f-e1-0": "2"}, "reset weights are loaded again before they serve"


def test_a_request_on_a_new_resource_counts_as_done() -> None:
    fleet = Simulation(weightCheck={"requestID": "7", "action": "Reset"}, profile={"requestID": "1", "steps": 5})
    fleet.settle()
    assert fleet.done_operations == []
    assert "counts as done" in fleet.rollout.status.last_weight_check.message  # type: ignore[union-attr]
    assert fleet.condition("Ready").status == "True"


def test_under_external_control_the_newest_version_read_back_is_the_target() -> None:
    fleet = Simulation(control="External")
    fleet.settle()
    e0, e1 = (pod for pod in fleet.pods.values() if pod.engine_index is not None)
    assert e0.engine is not None
    assert e1.engine is not None
    e0.engine.bytes_version = "trained-1"
    fleet.settle(6)
    assert fleet.serving() == {e0.name: "trained-1"}
    assert not any(pod.desired.move for pod in (e0, e1) if pod.desired)
    e1.engine.bytes_version = "trained-1"
    fleet.settle(6)
    assert set(fleet.serving().values()) == {"trained-1"}
    fleet.kill_engine(e1.uid)
    fleet.settle()
    assert fleet.serving() == {e0.name: "trained-1"}, "a restarted engine is not routable before it was moved on"
    assert e1.engine is not None
    for label in ("trained-2", "trained-1"):
        e0.engine.bytes_version = e1.engine.bytes_version = label
        fleet.settle(6)
        assert set(fleet.serving().values()) == {label}, "a trainer may go back to an earlier version"
    fleet.kill_engine(e0.uid)
    fleet.kill_engine(e1.uid)
    fleet.settle()
    assert fleet.serving() == {}, "what engines start from is no version to go back to"


def sent(version: str, transfer: str = "Staged", port: int = 29600, **more: Any) -> dict[str, Any]:
    senders = [{"address": "10.9.0.1", "port": port}]
    return {
        "version": version,
        "source": {"type": "Distributed", "distributed": {"transfer": transfer, "senders": senders}},
        **more,
    }


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("transfer", ["Staged", "Direct"])
def test_what_a_trainer_sends_reaches_every_engine(transfer: str, nodes: int) -> None:
    fleet = Simulation(engine={"image": "i", "nodes": nodes, "tensorParallelSize": nodes})
    fleet.settle()
    fleet.trainers = {"t1"}
    fleet.patch(weights=sent("t1", transfer))
    fleet.settle(12)
    assert set(fleet.serving().values()) == {"t1"}
    assert fleet.boot.version == "default", "engines start from a folder"
    transaction = fleet.weights.transaction
    assert transaction is not None
    assert transaction.members == (2 * nodes if transfer == "Staged" else 2)
    assert fleet.weights.history[-1].root == transaction.root == "root-t1"
    assert fleet.condition("Ready").status == "True"


def test_an_engine_that_starts_again_has_what_was_sent_from_its_own_stage_or_a_peer() -> None:
    fleet = Simulation()
    fleet.settle()
    fleet.trainers = {"t1"}
    fleet.patch(weights=sent("t1"))
    fleet.settle()
    fleet.trainers = set()
    e0, e1 = (pod for pod in fleet.pods.values() if pod.engine_index is not None)
    fleet.kill_engine(e0.uid)
    fleet.settle()
    assert set(fleet.serving().values()) == {"t1"}
    assert len(fleet.serving()) == 2
    fleet.delete_pod(e1.uid)
    fleet.settle()
    assert set(fleet.serving().values()) == {"t1"}
    assert len(fleet.serving()) == 2
    assert fleet.condition("Ready").status == "True"


def test_a_trainer_that_is_gone_leaves_the_old_version_serving_and_is_asked_again() -> None:
    fleet = Simulation()
    fleet.settle()
    fleet.patch(weights=sent("t1"))
    fleet.settle(5)
    assert set(fleet.serving().values()) == {"default"}
    ready = fleet.condition("Ready")
    assert (ready.status, ready.reason) == ("False", "WeightsRefused")
    assert "nobody sends it" in ready.message
    fleet.trainers = {"t1"}
    fleet.settle(40)
    assert set(fleet.serving().values()) == {"t1"}


def test_who_missed_the_trainer_has_it_from_the_others_before_the_decision() -> None:
    fleet = Simulation(replicas=3)
    fleet.settle()
    fleet.trainers = {"t1"}
    fleet.patch(weights=sent("t1"))
    fleet.reconcile()
    for uid in list(fleet.pods):
        fleet.hear(uid)
        fleet.run_pod(uid)
        fleet.trainers = set()  # it dies when the first has it
        fleet.deliver(uid)
    assert fleet.weights.transaction is not None
    assert fleet.weights.transaction.decision is None
    fleet.settle(10)
    assert fleet.serving() == {"f-e0-0": "t1", "f-e1-0": "t1", "f-e2-0": "t1"}


def test_weights_that_all_have_lost_are_told_and_a_new_version_ends_it() -> None:
    fleet = Simulation()
    fleet.settle()
    fleet.trainers = {"t1", "t2"}
    fleet.patch(weights=sent("t1"))
    fleet.settle()
    for pod in [pod for pod in fleet.pods.values() if pod.engine_index is not None]:
        fleet.delete_pod(pod.uid)
    for _ in range(30):
        fleet.settle(1)
        assert_truth(fleet, rolling=False)
    assert fleet.serving() == {}, "t1 is what the fleet serves, and the engines have started with another"
    degraded = fleet.condition("Degraded")
    assert degraded.status == "True"
    assert "nobody has version t1 any more" in degraded.message
    fleet.patch(weights=sent("t2"))
    fleet.settle()
    assert set(fleet.serving().values()) == {"t2"}
    assert fleet.condition("Ready").status == "True"


def test_a_decided_move_whose_weights_all_died_with_their_engines_ends_and_the_old_version_serves_on() -> None:
    fleet = Simulation()
    fleet.settle()
    fleet.trainers = {"t1"}
    fleet.patch(weights=sent("t1"))
    while fleet.weights.transaction is None or fleet.weights.transaction.decision is None:
        fleet.settle(1)
    for pod in [pod for pod in fleet.pods.values() if pod.engine_index is not None]:
        fleet.delete_pod(pod.uid)
    fleet.trainers = set()
    for _ in range(20):
        fleet.settle(1)
        assert_truth(fleet, rolling=False)
    assert set(fleet.serving().values()) == {"default"}
    assert "WeightsLost" in fleet.events
    assert "publish it again" in fleet.condition("Degraded").message


def test_engines_that_were_given_different_bytes_move_nowhere() -> None:
    fleet = Simulation()
    fleet.settle()
    fleet.odd_pods = {"f-e1-0"}
    fleet.patch(weights=disk("2"))
    fleet.settle(10)
    assert set(fleet.serving().values()) == {"default"}
    assert "different bytes" in fleet.condition("Degraded").message
    fleet.odd_pods = set()
    fleet.settle(40)
    assert set(fleet.serving().values()) == {"2"}


def test_who_was_given_other_bytes_after_the_decision_takes_no_part() -> None:
    fleet = Simulation()
    fleet.settle()
    fleet.patch(weights=disk("2"))
    while fleet.weights.transaction is None or fleet.weights.transaction.decision is None:
        fleet.settle(1)
    odd = next(pod for pod in fleet.pods.values() if pod.engine_index == 1)
    fleet.odd_pods = {odd.name}
    fleet.restart_agent(odd.uid)
    fleet.lose_stage(odd.uid)
    while fleet.weights.version != "2":
        fleet.settle(1)
        assert_truth(fleet, rolling=False)
    assert odd.name not in fleet.serving()
    orders = odd.orders
    assert orders is not None
    assert orders.move is not None
    assert orders.move.id.startswith("catch-up")


@pytest.mark.parametrize("slots", [0, 2])
def test_fleets_without_a_stage_and_with_a_roomy_one_move_and_recover(slots: int) -> None:
    fleet = Simulation()
    fleet.stage_slots = slots
    fleet.settle()
    for version in ("2", "3"):
        fleet.patch(weights=disk(version))
        fleet.settle()
        fleet.kill_engine(next(pod.uid for pod in fleet.pods.values() if pod.engine_index == 0))
        fleet.settle()
        assert fleet.serving() == {"f-e0-0": version, "f-e1-0": version}


def test_a_pod_that_can_stage_nothing_does_not_keep_the_fleet_where_it_is() -> None:
    fleet = Simulation()
    fleet.settle()
    fleet.trainers = {"t1"}
    fleet.broken_stages = {"f-e1-0"}
    fleet.settle(1)
    fleet.patch(weights=sent("t1"))
    fleet.settle(15)
    assert fleet.serving() == {"f-e0-0": "t1"}
    assert fleet.weights.transaction is not None
    assert fleet.weights.transaction.members == 1
    fleet.broken_stages = {"f-e0-0", "f-e1-0"}
    fleet.settle(1)
    fleet.trainers = {"t2"}
    fleet.patch(weights=sent("t2"))
    fleet.settle(15)
    assert fleet.serving() == {"f-e0-0": "t1"}
    assert "nothing can be staged here" in fleet.condition("Ready").message


def test_the_trainer_waits_for_no_engine_that_catches_up_first() -> None:
    fleet = Simulation(replicas=3)
    fleet.settle()
    fleet.patch(weights=disk("2"))
    fleet.settle()
    behind = next(pod for pod in fleet.pods.values() if pod.engine_index == 2)
    assert behind.engine is not None
    behind.engine.bytes_version = "default"
    fleet.deliver(behind.uid)
    fleet.trainers = {"t1"}
    fleet.patch(weights=sent("t1"))
    fleet.reconcile()
    assert fleet.weights.transaction is not None
    assert fleet.weights.transaction.members == 2
    fleet.settle(20)
    assert set(fleet.serving().values()) == {"t1"}
    assert len(fleet.serving()) == 3


def test_a_label_that_was_served_is_not_taken_from_a_trainer_again() -> None:
    fleet = Simulation()
    fleet.settle()
    fleet.trainers = {"t1", "t2"}
    for version in ("t1", "t2", "t1"):
        fleet.patch(weights=sent(version))
        fleet.settle()
    assert set(fleet.serving().values()) == {"t2"}
    assert "label of its own" in fleet.condition("Degraded").message


def test_what_is_staged_ahead_is_committed_without_the_trainer() -> None:
    fleet = Simulation()
    fleet.settle()
    fleet.trainers = {"t1"}
    ahead = {"version": "t1", "source": sent("t1")["source"]}
    fleet.patch(weights={"prepare": ahead})
    fleet.settle(6)
    assert set(fleet.serving().values()) == {"default"}
    prepared = fleet.weights.prepared
    assert prepared is not None
    assert (prepared.version, prepared.engines, prepared.root, prepared.members) == ("t1", 2, "root-t1", 2)
    fleet.trainers = set()
    fleet.patch(weights={"prepare": ahead, **sent("t1")})
    fleet.settle(10)
    assert set(fleet.serving().values()) == {"t1"}
    assert fleet.condition("Ready").status == "True"


def ordered(fleet: Simulation) -> list[WeightMove]:
    """What the engines are to stage or to move to."""
    fleet.reconcile()
    desired = [pod.orders for pod in fleet.pods.values() if pod.engine_index is not None and pod.orders]
    return [order for one in desired if (order := one.move or one.prepare) is not None]


def test_what_another_trainer_staged_ahead_by_the_same_label_is_not_what_is_moved_to() -> None:
    fleet = Simulation()
    fleet.settle()
    fleet.trainers = {"t1"}
    ahead = {"version": "t1", "source": sent("t1", port=1)["source"]}
    fleet.patch(weights={"prepare": ahead})
    fleet.settle(6)
    assert fleet.weights.prepared is not None
    assert fleet.weights.prepared.engines == 2
    for left in ({}, {"prepare": ahead}):
        fleet.patch(weights={**left, **sent("t1", port=2)})
        orders = ordered(fleet)
        assert orders
        assert all(order.source.senders == ["10.9.0.1:2"] and not order.source.root for order in orders)


def test_a_move_to_what_one_trainer_staged_ahead_ends_when_spec_names_another() -> None:
    fleet = Simulation()
    fleet.settle()
    fleet.trainers = {"t1"}
    ahead = {"prepare": {"version": "t1", "source": sent("t1", port=1)["source"]}}
    fleet.patch(weights=ahead)
    fleet.settle(6)
    fleet.patch(weights={**ahead, **sent("t1", port=1)})
    assert {order.source.root for order in ordered(fleet)} == {"root-t1"}
    fleet.patch(weights={**ahead, **sent("t1", port=2)})
    orders = ordered(fleet)
    assert all(order.source.senders == ["10.9.0.1:2"] and not order.source.root for order in orders)


def test_weights_that_another_trainer_stages_ahead_by_the_same_label_are_another_order() -> None:
    fleet = Simulation()
    fleet.settle()
    fleet.trainers = {"t1", "t2"}
    seen: list[str] = []
    for version, port in (("t1", 1), ("t1", 2), ("t2", 1), ("t1", 1)):
        fleet.patch(weights={"prepare": {"version": version, "source": sent(version, port=port)["source"]}})
        names = {order.id for order in ordered(fleet)}
        assert len(names) == 1
        seen += names
        fleet.settle(6)
        assert fleet.weights.prepared is not None
        assert fleet.weights.prepared.engines == 2
    assert len(set(seen)) == 4, "an agent that missed one in between must not take an older one's bytes for it"


def test_other_changes_of_spec_do_not_stage_anew() -> None:
    fleet = Simulation()
    fleet.settle()
    fleet.trainers = {"t1"}
    ahead = {"prepare": {"version": "t1", "source": sent("t1")["source"]}}
    fleet.patch(weights=ahead)
    before = ordered(fleet)
    fleet.settle(6)
    fleet.trainers = set()
    fleet.patch(execution={"state": "Paused"})
    assert {order.id for order in ordered(fleet)} == {order.id for order in before}
    fleet.settle(6)
    assert fleet.weights.prepared is not None
    assert fleet.weights.prepared.engines == 2


def test_an_order_to_stage_ahead_that_was_forgotten_in_the_spec_is_over_when_it_was_served() -> None:
    fleet = Simulation()
    fleet.settle()
    fleet.trainers = {"t1", "t2"}
    ahead = {"version": "t1", "source": sent("t1")["source"]}
    fleet.patch(weights={"prepare": ahead, **sent("t1")})
    fleet.settle(12)
    fleet.patch(weights={"prepare": ahead, **sent("t2")})
    fleet.settle(12)
    assert set(fleet.serving().values()) == {"t2"}
    assert fleet.weights.prepared is None
    assert not any(pod.orders.prepare for pod in fleet.pods.values() if pod.orders)


def test_what_cannot_be_staged_ahead_is_told_and_tried_again() -> None:
    fleet = Simulation()
    fleet.settle()
    fleet.patch(weights={"prepare": {"version": "t1", "source": sent("t1")["source"]}})
    fleet.settle(4)
    prepared = fleet.weights.prepared
    assert prepared is not None
    assert "nobody sends it" in prepared.message
    assert fleet.condition("Ready").status == "True", "what is served is what spec asks for"
    fleet.trainers = {"t1"}
    fleet.settle(40)
    prepared = fleet.weights.prepared
    assert prepared is not None
    assert (prepared.engines, prepared.message) == (2, "")
    fleet.patch(weights={})
    fleet.settle(4)
    assert fleet.weights.prepared is None


def test_weights_that_somebody_else_moves_are_waited_for_and_gated() -> None:
    fleet = Simulation()
    fleet.settle()
    fleet.patch(weights={"version": "x1", "source": {"type": "External"}})
    fleet.settle(4)
    e0, e1 = (pod for pod in fleet.pods.values() if pod.engine_index is not None)
    assert e0.engine is not None
    assert e1.engine is not None
    e0.engine.paused = True
    e0.engine.bytes_version = "x1"
    for _ in range(6):
        fleet.settle(1)
    assert fleet.serving() == {e1.name: "default"}
    e1.engine.bytes_version = "x1"
    fleet.deliver(e1.uid)
    fleet.settle(6)
    assert set(fleet.serving().values()) == {"x1"}
    assert len(fleet.serving()) == 2
    assert fleet.condition("Ready").status == "True"


@pytest.mark.parametrize("failing", range(12))
@pytest.mark.parametrize("slow", [1, 4], ids=["", "slow-router"])
@pytest.mark.parametrize("moved_by", ["somebody else", "restarts"])
def test_engines_leave_the_routers_once_in_a_move_and_come_back_once_whichever_write_fails(
    moved_by: str, slow: int, failing: int
) -> None:
    by_restarts = moved_by == "restarts"
    fleet = Simulation(**({"engine": {"image": "i", "pipelineParallelSize": 2}} if by_restarts else {}))
    fleet.settle()
    fleet.patch(weights=disk("2") if by_restarts else {"version": "2", "source": {"type": "External"}})
    router = next(pod for pod in fleet.pods.values() if pod.engine_index is None)
    given = [2]
    for turn in range(30):
        if by_restarts and turn == slow:
            fleet.kill_engine(next(uid for uid, pod in fleet.pods.items() if pod.engine_index == 0))
        fleet.reconcile(status_write_fails=turn == failing)
        assert router.router_orders is not None
        given.append(len(router.router_orders.workers))
        for uid, pod in list(fleet.pods.items()):
            if pod is router and turn % slow:
                continue
            fleet.hear(uid)
            fleet.run_pod(uid)
            if pod.engine and not by_restarts:
                pod.engine.bytes_version = "2"
            fleet.deliver(uid)
        fleet.now += timedelta(seconds=1)
    assert len(fleet.serving()) == 2
    assert set(fleet.serving().values()) == {"2"}
    lowest = given.index(0)
    assert given[: lowest + 1] == sorted(given[: lowest + 1], reverse=True)
    assert given[lowest:] == sorted(given[lowest:])


def test_a_group_starts_again_only_when_that_is_counted() -> None:
    fleet = Simulation(engine={"image": "i", "nodes": 2, "tensorParallelSize": 2}, replicas=1)
    fleet.settle()
    first, second = (pod for pod in fleet.pods.values() if pod.engine_index == 0)
    fleet.delete_pod(second.uid)
    for _ in range(3):
        fleet.reconcile(status_write_fails=True)
        assert not first.terminating
    fleet.reconcile()
    assert first.terminating
    fleet.settle()
    assert [engine.restarts for engine in fleet.rollout.status.engines] == [1]
    assert fleet.condition("Ready").status == "True"


def test_an_engine_on_its_way_into_the_routers_is_away_also_when_the_status_is_late() -> None:
    """Else one more would be taken away to replace its pods."""
    fleet = Simulation(replicas=3)
    fleet.settle()
    fleet.patch(weights=disk("2"))
    while not (fleet.weights.transaction and fleet.weights.transaction.decision):
        fleet.reconcile()
        for uid in list(fleet.pods):
            fleet.hear(uid)
            fleet.run_pod(uid)
            fleet.deliver(uid)
    late = fleet.object
    fleet.settle()
    now = fleet.observe()
    without = {
        uid: replace(report, registered=[worker for worker in report.registered if worker.engine != "f-e1"])
        for uid, report in now.routers.items()
    }
    for told, version in ((late, "default"), (fleet.object, "2")):
        assert told["status"]["weights"]["version"] == version
        known = replace(now, rollout=SGLangRollout.from_object(told), routers=without)
        assert _coming(view_engines(known, fleet.now), known) == {1}


def test_the_epoch_grows_when_a_pod_comes_or_goes() -> None:
    fleet = Simulation()
    fleet.settle()
    before = fleet.weights.epoch
    fleet.settle()
    assert fleet.weights.epoch == before
    fleet.delete_pod(next(pod.uid for pod in fleet.pods.values() if pod.engine_index == 1))
    fleet.settle()
    assert fleet.weights.epoch > before


SCRAMBLE = st.tuples(st.just("scramble"), st.integers(0, 2**32))
FAULTS = st.one_of(
    st.tuples(st.just("kill_engine"), st.integers(0, 7)),
    st.tuples(st.just("delete_pod"), st.integers(0, 7)),
    st.tuples(st.just("restart_router"), st.integers(0, 7)),
    st.tuples(st.just("break_apply"), st.just(0)),
    st.tuples(st.just("lose_node"), st.integers(0, 7)),
    st.tuples(st.just("return_nodes"), st.just(0)),
    st.tuples(st.just("restart_agent"), st.integers(0, 7)),
    st.tuples(st.just("cut_off"), st.integers(0, 7)),
    st.tuples(st.just("reconnect"), st.just(0)),
    st.tuples(st.just("wait"), st.integers(1, 700)),
    st.tuples(st.just("trainer_dies"), st.just(0)),
    st.tuples(st.just("trainer_replaced"), st.just(0)),
    st.tuples(st.just("lose_stage"), st.integers(0, 7)),
)
PATCHES = st.one_of(
    st.tuples(st.just("version"), st.integers(2, 9)),
    st.tuples(st.just("version"), st.integers(2, 9)),
    st.tuples(st.just("bad_version"), st.integers(20, 22)),
    st.tuples(st.just("publish"), st.sampled_from(["Staged", "Staged", "Direct"])),
    st.tuples(st.just("publish"), st.sampled_from(["Staged", "Staged", "Direct"])),
    st.tuples(st.just("prepare"), st.just(0)),
    st.tuples(st.just("execution"), st.booleans()),
    st.tuples(st.just("replicas"), st.integers(1, 3)),
    st.tuples(st.just("image"), st.integers(2, 4)),
    st.tuples(st.just("release"), st.booleans()),
    st.tuples(st.just("resident"), st.just(0)),
    st.tuples(st.just("check"), st.sampled_from(["Reset", "Checksum"])),
    st.tuples(st.just("request"), st.sampled_from(["flushCache", "abortRequests", "profile", "restart"])),
    st.tuples(st.just("failure_policy"), st.sampled_from(["KeepGated", "RestartEngine"])),
)
PIPELINE_PATCHES = st.one_of(
    st.tuples(st.just("version"), st.integers(2, 5)),
    st.tuples(st.just("version"), st.integers(2, 5)),
    st.tuples(st.just("bad_version"), st.integers(20, 22)),
    st.tuples(st.just("replicas"), st.integers(1, 3)),
    st.tuples(st.just("image"), st.integers(2, 4)),
    st.tuples(st.just("request"), st.sampled_from(["flushCache", "abortRequests", "restart"])),
)
# What a user does, then some time in which things go wrong.
ACTIONS = st.lists(
    st.tuples(PATCHES, st.lists(st.one_of(SCRAMBLE, SCRAMBLE, FAULTS), min_size=1, max_size=6)), max_size=6
)


def act(fleet: Simulation, action: tuple[str, Any], strategy: dict[str, Any], check: Callable[[], None]) -> None:
    kind, value = action
    uids = sorted(fleet.pods)
    uid = uids[value % len(uids)] if uids and isinstance(value, int) else ""
    match kind:
        case "scramble":
            fleet.scramble(value, check)
        case "kill_engine":
            fleet.kill_engine(uid)
        case "delete_pod":
            fleet.delete_pod(uid)
        case "restart_router":
            fleet.restart_router(uid)
        case "lose_node":
            fleet.lose_node_of(uid)
        case "return_nodes":
            fleet.return_nodes()
        case "restart_agent":
            fleet.restart_agent(uid)
        case "cut_off":
            fleet.cut_off(uid)
        case "reconnect":
            fleet.reconnect()
        case "break_apply":
            fleet.break_next_apply = True
        case "version" | "bad_version":
            if kind == "bad_version":
                fleet.bad_paths.add(f"/models/v{value}")
            fleet.patch(weights=disk(str(value), updateStrategy=strategy))
        case "publish":
            label = f"t{fleet.object['metadata']['generation']}"
            fleet.trainers.add(label)
            fleet.patch(weights=sent(label, value, updateStrategy=strategy))
        case "prepare":
            label = f"t{fleet.object['metadata']['generation']}"
            fleet.trainers.add(label)
            ahead = {"version": label, "source": sent(label)["source"]}
            fleet.patch(weights={**fleet.object["spec"].get("weights", {}), "prepare": ahead})
        case "trainer_dies":
            fleet.trainers.clear()
        case "trainer_replaced":
            fleet.replace_trainer()
        case "lose_stage":
            fleet.lose_stage(uid)
        case "execution":
            fleet.patch(execution={"state": "Paused" if value else "Running"}, memory={})
        case "release":
            backup = "HostMemory" if value else "None"
            fleet.patch(execution={"state": "Paused"}, memory={**ALL_RELEASED, "weightsBackup": backup})
        case "resident":
            fleet.patch(execution={"state": "Running"}, memory={})
        case "check":
            fleet.patch(weightCheck={"requestID": str(len(fleet.events)), "action": value})
        case "request":
            fleet.patch(**{value: {"requestID": str(len(fleet.events))}})
        case "failure_policy":
            fleet.patch(weights={**fleet.object["spec"].get("weights", {}), "failurePolicy": value})
        case "replicas":
            fleet.patch(replicas=value)
        case "image":
            fleet.patch(engine={**fleet.object["spec"]["engine"], "image": f"sglang:{value}"})
        case "wait":
            fleet.now += timedelta(seconds=value)


@pytest.mark.parametrize("rolling", [False, True], ids=["all-at-once", "rolling"])
@pytest.mark.parametrize("nodes", [1, 2])
@settings(max_examples=EXAMPLES)
@given(
    story=st.lists(
        st.tuples(PIPELINE_PATCHES, st.lists(st.one_of(SCRAMBLE, SCRAMBLE, FAULTS), min_size=1, max_size=6)), max_size=5
    )
)
def test_no_schedule_moves_a_pipeline_but_by_engines_that_start_again(
    nodes: int, rolling: bool, story: list[tuple[tuple[str, Any], list[tuple[str, Any]]]]
) -> None:
    strategy = {"type": "Rolling" if rolling else "AllAtOnce"}
    engine = {"image": "i", "nodes": nodes, "tensorParallelSize": 1, "pipelineParallelSize": 2}
    fleet = Simulation(engine=engine, staleness={"maxVersionLag": 1 if rolling else 0}, router={"replicas": 2})

    def check() -> None:
        assert_truth(fleet, rolling)

    play(fleet, story, strategy, check)
    fleet.bad_paths.clear()
    fleet.reconnect()
    for _ in range(150):
        fleet.settle(1, seconds=15)
        check()
        if fleet.condition("Ready").status == "True":
            fleet.settle(20, seconds=15)
            break
    assert set(fleet.serving().values()) == {fleet.weights.target_version}
    assert len(fleet.serving()) == fleet.rollout.spec.replicas
    assert fleet.condition("Ready").status == "True", fleet.condition("Ready")


def test_a_pipeline_moves_without_two_versions_and_without_losing_more_than_may_be_away() -> None:
    engine = {"image": "i", "pipelineParallelSize": 2}
    fleet = Simulation(engine=engine, staleness={"maxVersionLag": 1}, replicas=3)
    fleet.settle()
    fleet.patch(weights=disk("2", updateStrategy={"type": "Rolling", "maxUnavailable": 1}))
    seen = set()
    for _ in range(120):
        fleet.settle(1)
        assert len(fleet.serving()) >= 2
        seen |= set(fleet.serving().values())
    assert seen == {"default", "2"}
    assert set(fleet.serving().values()) == {"2"}


def play(
    fleet: Simulation,
    story: list[tuple[tuple[str, Any], list[tuple[str, Any]]]],
    strategy: dict[str, Any],
    check: Callable[[], None],
) -> None:
    """A new fleet, and then all that happens to it."""
    fleet.settle(12)
    for patch, time in story:
        for action in (patch, *time):
            act(fleet, action, strategy, check)
            check()


def conditions(fleet: Simulation) -> tuple[Condition, ...]:
    return fleet.rollout.status.conditions


def assert_truth(fleet: Simulation, rolling: bool) -> None:
    """What requests get now: whole weights, of a version that is allowed, and of one version at a time unless they
    move engine by engine."""
    served = set(fleet.serving().values())
    assert "mixed" not in served
    if not rolling:
        assert len(served) <= 1, f"two versions serve at once: {fleet.serving()}"
    fleet.seen |= fleet.serving_roots()
    labels = [label for label, _ in fleet.seen]
    assert len(labels) == len(set(labels)), f"a label was served with different bytes: {sorted(fleet.seen)}"
    weights = fleet.rollout.status.weights
    if weights is None:
        return
    versions = [entry.version for entry in weights.history]
    transaction = weights.transaction
    decided = {transaction.version} if transaction is not None and transaction.decision == "Commit" else set()
    allowed = {*versions[-2 if rolling else -1 :], *decided}
    assert served <= allowed, f"{served - allowed} is served, {allowed} is allowed"


@pytest.mark.parametrize("rolling", [False, True], ids=["all-at-once", "rolling"])
@pytest.mark.parametrize("nodes", [1, 2])
@settings(max_examples=EXAMPLES)
@given(story=ACTIONS)
# A slow router still has an engine of a version that the decision of a rolling move takes away.
@example(
    story=[
        (("version", 2), [("kill_engine", 0), ("break_apply", 0), ("delete_pod", 2)]),
        (("image", 2), [("scramble", 108)]),
        (("version", 3), [("scramble", 1246), ("scramble", 0)]),
    ]
)
# A slow router has not taken the order that leaves out an engine whose weights are about to be overwritten.
@example(
    story=[
        (("version", 2), [("scramble", 4)]),
        (("image", 2), [("kill_engine", 3), ("delete_pod", 1)]),
        (("replicas", 3), [("delete_pod", 0), ("scramble", 0)]),
        (("check", "Reset"), [("scramble", 1), ("scramble", 1)]),
    ]
)
# A catch-up is given up on a late report, and the engine needs it after all.
@example(
    story=[
        (
            ("resident", 0),
            [
                ("scramble", 513),
                ("scramble", 13012480),
                ("scramble", 0),
                ("break_apply", 0),
                ("delete_pod", 0),
                ("break_apply", 0),
            ],
        ),
        (("replicas", 3), [("kill_engine", 0), ("break_apply", 0)]),
        (("release", True), [("return_nodes", 0), ("scramble", 25240)]),
        (("release", False), [("delete_pod", 3)]),
        (
            ("check", "Reset"),
            [
                ("scramble", 513),
                ("scramble", 13012480),
                ("kill_engine", 6),
                ("break_apply", 0),
                ("delete_pod", 0),
                ("break_apply", 0),
            ],
        ),
    ]
)
# The process that replaces one which was reset reads the order to do so when the routers have it already.
@example(
    story=[
        (("version", 2), [("delete_pod", 0), ("scramble", 4), ("kill_engine", 3)]),
        (("replicas", 3), [("kill_engine", 0)]),
        (("image", 2), [("scramble", 0)]),
        (("check", "Reset"), [("wait", 115), ("scramble", 656)]),
    ]
)
def test_no_schedule_serves_a_wrong_version_and_every_schedule_converges(
    nodes: int, rolling: bool, story: list[tuple[tuple[str, Any], list[tuple[str, Any]]]]
) -> None:
    strategy = {"type": "Rolling" if rolling else "AllAtOnce"}
    engine = {"image": "i", "nodes": nodes, "tensorParallelSize": nodes}
    fleet = Simulation(engine=engine, staleness={"maxVersionLag": 1 if rolling else 0}, router={"replicas": 2})
    fleet.stage_slots = 1 + len(story) % 2

    def check() -> None:
        assert_truth(fleet, rolling)

    play(fleet, story, strategy, check)
    fleet.bad_paths.clear()
    fleet.break_next_apply = False
    fleet.reconnect()
    act(fleet, ("failure_policy", "RestartEngine"), strategy, check)
    # The trainer of what is wanted is back.
    fleet.trainers.add(fleet.rollout.spec.weights.version or "")
    fleet.patch(execution={"state": "Running"}, memory={})
    for rounds in range(150):
        fleet.settle(1, seconds=15)
        check()
        if rounds == 75:
            # It may have been served and lost by all: then the trainer publishes anew.
            assert any("nobody has" in c.message or "label of its own" in c.message for c in conditions(fleet))
            fleet.trainers.add("last")
            fleet.patch(weights=sent("last", updateStrategy=strategy))
        if fleet.condition("Ready").status == "True":
            # What was Ready by reports of a world that has moved on must be Ready in the present one, too.
            fleet.settle(40, seconds=15)
            break
    target = fleet.weights.target_version
    assert set(fleet.serving().values()) == {target}
    assert len(fleet.serving()) == fleet.rollout.spec.replicas
    assert fleet.condition("Ready").status == "True", fleet.condition("Ready")
    assert not fleet.needless
