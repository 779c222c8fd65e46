"""What status and events say of pauses, of memory that a trainer gave away, and of checks; what replaces no pods."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sglang_rollout.api import Status, WeightsStatus, find_condition
from sglang_rollout.api.names import engine_name
from sglang_rollout.api.status import WeightTransaction
from sglang_rollout.controller.status_writes import is_quiet
from sglang_rollout.protocol.memory import MemoryTag
from sglang_rollout.protocol.operations import OperationReport, OperationResult
from sglang_rollout.protocol.report import TURNED_INTO_RETRACT
from sglang_rollout.transitions import revisions
from sglang_rollout.transitions.fleet_conditions import move_detail
from sglang_rollout.transitions.plan import plan
from sglang_rollout.transitions.weight_checks import _of_engine, _passed

from .simulation import SimEngine, Simulation, rollout_object


def engines_of(fleet: Simulation) -> list[SimEngine]:
    return [pod.engine for pod in fleet.pods.values() if pod.engine is not None]


def phase(fleet: Simulation) -> str:
    return str(fleet.rollout.status.execution_state)


def test_an_engine_without_a_label_is_not_said_to_be_at_one() -> None:
    fleet = Simulation(control="External")
    fleet.settle()
    engines_of(fleet)[0].bytes_version = ""
    fleet.settle(6)
    (name, message), _ = [(engine.name, engine.message) for engine in fleet.rollout.status.engines]
    assert (name[-2:], message) == ("e0", "moving to default")


def test_a_trainers_own_pause_is_told_and_is_what_is_wanted() -> None:
    fleet = Simulation(control="External")
    fleet.settle()
    first, second = engines_of(fleet)
    first.paused = True
    fleet.settle(6)
    assert phase(fleet) == "Running"
    assert fleet.condition("Ready").status == "True"
    second.paused = True
    fleet.settle(6)
    assert phase(fleet) == "Paused"
    assert (fleet.condition("Ready").status, fleet.condition("Ready").reason) == ("True", "Paused")
    assert fleet.condition("Paused").status == "True"
    first.paused = second.paused = False
    fleet.settle(6)
    assert phase(fleet) == "Running"
    assert fleet.condition("Ready").reason == "AllRoutable"


def test_memory_that_a_trainer_released_is_not_waited_for() -> None:
    fleet = Simulation(control="External")
    fleet.settle()
    for engine in engines_of(fleet):
        engine.released, engine.paused = [MemoryTag.KV_CACHE], True
    fleet.settle(6)
    assert fleet.serving() == {}
    assert (fleet.condition("Ready").status, fleet.condition("Ready").reason) == ("True", "MemoryReleased")
    assert fleet.condition("Available").status == "False"


@pytest.mark.parametrize(
    "network",
    [{"trainers": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}, {"trainerAccounts": [{"name": "trainer"}]}],
    ids=lambda network: next(iter(network)),
)
def test_who_may_come_replaces_no_pods(network: dict[str, object]) -> None:
    before, after = (Simulation(**spec).rollout.spec for spec in ({}, {"network": network}))
    assert revisions.spec_hash(after) == revisions.spec_hash(before)
    assert revisions.router_hash(after) == revisions.router_hash(before)
    other = Simulation(network={"hostNetwork": True}).rollout.spec
    assert revisions.spec_hash(other) != revisions.spec_hash(before)


def test_a_check_tells_what_each_engine_said() -> None:
    fleet = Simulation()
    fleet.settle()
    fleet.patch(weightCheck={"requestID": "7", "action": "Snapshot"})
    fleet.settle()
    check = fleet.rollout.status.last_weight_check
    assert check is not None
    names = [engine_name(fleet.rollout.metadata.name, index) for index in range(2)]
    assert [(one.name, one.result) for one in check.engines] == [(name, "Passed") for name in names]


@pytest.mark.parametrize(
    ("field", "last"), [("flushCache", "last_flush_cache"), ("abortRequests", "last_abort_requests")]
)
def test_a_request_is_done_once_on_every_engine_and_told(field: str, last: str) -> None:
    fleet = Simulation()
    fleet.settle()
    for request in ("1", "2"):
        fleet.patch(**{field: {"requestID": request}})
        fleet.settle()
        told = getattr(fleet.rollout.status, last)
        assert (told.request_id, told.result, told.message) == (request, "Completed", "2 engines")
        assert told.completion_time is not None
    assert len(fleet.done_operations) == len(set(fleet.done_operations)) == 4
    assert not any(order.operations for order in fleet.reconcile().agents.values()), "it is forgotten"


def test_engines_that_start_again_for_flags_finish_what_they_serve_first() -> None:
    fleet = Simulation()
    fleet.settle()
    released = {"weights": "Released", "kvCache": "Released", "cudaGraph": "Released", "weightsBackup": "HostMemory"}
    fleet.patch(execution={"state": "Paused"}, memory=released)
    orders = []
    for _ in range(40):
        fleet.settle(1)
        orders += [order for order in fleet.reconcile().agents.values() if order.restart_engine]
        degraded = fleet.condition("Degraded")
        assert degraded.status == "False", degraded.message
    assert orders
    assert all(order.restart_drains for order in orders)


def test_a_router_that_is_behind_is_told_in_its_own_words() -> None:
    fleet = Simulation()
    fleet.settle()
    seen = fleet.observe()
    behind = {
        uid: replace(report, in_step=False, message="worker e0: connection refused")
        for uid, report in seen.routers.items()
    }
    told = plan(replace(seen, routers=behind), fleet.now).status.conditions
    for kind in ("RouterSynced", "Progressing", "Ready"):
        condition = find_condition(told, kind)
        assert condition is not None
        assert "router pod f-router-" in condition.message
        assert "worker e0: connection refused" in condition.message


def test_a_router_that_was_left_and_keeps_engines_is_told() -> None:
    fleet = Simulation()
    fleet.settle()
    words = "http://old:1 is to forget the fleet's engines: no answer"
    told = plan(replace(fleet.observe(), external_untold=True, parting=(words,)), fleet.now).status.conditions
    synced = find_condition(told, "RouterSynced")
    assert synced is not None
    assert (synced.status, words in synced.message) == ("False", True)


def test_a_trainer_finds_engines_that_can_release() -> None:
    fleet = Simulation(control="External")
    fleet.settle()
    assert all(engine.launch.memory_saver for engine in engines_of(fleet))


def test_an_engine_that_could_not_is_named() -> None:
    fleet = Simulation()
    fleet.settle()
    busy = OperationReport("flush:1", OperationResult.ERROR, "the engine was not free for it")
    engines_of(fleet)[0].operations["flush:1"] = busy
    fleet.patch(flushCache={"requestID": "1"})
    fleet.settle()
    told = fleet.rollout.status.last_flush_cache
    assert told is not None
    assert (told.result, told.message) == ("Error", "f-e0: the engine was not free for it")
    assert "CacheFlush" in fleet.events


def test_engines_with_released_memory_are_named_when_they_do_not_answer() -> None:
    fleet = Simulation()
    fleet.settle()
    released = {"weights": "Released", "kvCache": "Released", "cudaGraph": "Released", "weightsBackup": "HostMemory"}
    fleet.patch(execution={"state": "Paused"}, memory=released, profile={"requestID": "1"})
    fleet.settle(80, seconds=10.0)
    told = fleet.rollout.status.last_profile
    assert told is not None
    assert told.result == "Error"
    assert "f-e0 has released" in told.message


def test_an_abort_is_told_in_the_middle_of_a_move_and_a_flush_is_not() -> None:
    fleet = Simulation()
    fleet.settle()
    fleet.cache_is_busy = lambda: True
    fleet.patch(weights={"version": "2", "source": {"type": "Disk", "disk": {"path": "/models/v2"}}})
    fleet.settle(6)
    assert fleet.weights.phase == "Committing"
    fleet.patch(flushCache={"requestID": "1"}, abortRequests={"requestID": "1"})
    fleet.settle(4)
    orders = list(fleet.reconcile().agents.values())
    assert [[operation.id for operation in order.operations] for order in orders] == [["abort:1"], ["abort:1"]]
    fleet.cache_is_busy = lambda: False
    fleet.settle()
    assert {operation for _, operation in fleet.done_operations} == {"abort:1", "flush:1"}


@pytest.mark.parametrize("request_", ["weightCheck", "profile", "flushCache", "abortRequests"])
def test_under_external_control_the_trainer_asks_by_itself(request_: str) -> None:
    fleet = Simulation(control="External")
    fleet.settle()
    more = {"action": "Checksum"} if request_ == "weightCheck" else {}
    fleet.patch(**{request_: {"requestID": "1", **more}})
    fleet.settle(4)
    told = fleet.rollout.status.to_object()[f"last{request_[0].upper()}{request_[1:]}"]
    assert told["result"] in ("Error", "Unsupported")
    assert told["message"] == "control is External: the trainer asks the engines for this by itself"
    assert fleet.done_operations == []


def test_the_tensors_that_differ_are_named_and_counted() -> None:
    report = OperationReport(
        "check:1", OperationResult.MISMATCH, "m", tensors=[f"t{n}" for n in range(12)], differing=40
    )
    told = _of_engine("f-e0", report, None)
    assert (told.result, len(told.mismatched_tensors), told.mismatched_count) == ("Mismatch", 10, 40)


def test_checksums_are_told_and_an_unlike_one_is_a_mismatch() -> None:
    report = OperationReport("check:1", OperationResult.PASSED, checksum="abc", sharding="tp_rank=0")
    assert _passed([report, replace(report)]) == "2 engines, checksum abc"
    assert _of_engine("f-e0", report, None).checksum == "abc"
    assert _of_engine("f-e0", report, "f-e0: checksum abc, most have abd").result == "Mismatch"
    assert _of_engine("f-e0", None, None).result == "Error"


def test_a_pause_in_place_that_was_turned_is_told_once() -> None:
    fleet = Simulation()
    fleet.settle()
    fleet.patch(execution={"state": "Paused", "pauseMode": "InPlace"})
    fleet.settle()
    name = f"{rollout_object()['metadata']['name']}-e0-0"
    uid = next(pod.uid for pod in fleet.pods.values() if pod.name == name)
    said = f"{TURNED_INTO_RETRACT}: the watchdog"
    fleet.delivered_agents[uid] = replace(fleet.delivered_agents[uid], message=said)
    fleet.reconcile()
    fleet.reconcile()
    assert fleet.events.count("PauseTurnedIntoRetract") == 1
    assert [engine.message for engine in fleet.rollout.status.engines] == [said, ""]


def test_memory_is_released_only_when_no_engine_is_on_its_way_back() -> None:
    released = {"weights": "Resident", "kvCache": "Released", "cudaGraph": "Released"}
    fleet = Simulation(execution={"state": "Paused"}, memory=released)
    fleet.settle()
    assert fleet.rollout.status.memory is not None
    assert fleet.rollout.status.memory.to_object() == released
    fleet.kill_engine(next(pod.uid for pod in fleet.pods.values() if pod.engine is not None))
    told = []
    for _ in range(30):
        fleet.settle(1)
        everyone = all("kvCache" in engine.released for engine in fleet.rollout.status.engines)
        memory = fleet.rollout.status.memory
        assert memory is not None
        told.append(memory.kv_cache)
        assert everyone or memory.kv_cache == "Resident"
    assert "Resident" in told
    assert told[-1] == "Released"


def test_a_version_of_a_trainer_gets_its_folder_when_spec_names_it() -> None:
    """An engine that starts after the trainer has handed the fleet back must find the weights."""
    fleet = Simulation(control="External")
    fleet.settle()
    for engine in engines_of(fleet):
        engine.bytes_version = "trained-1"
    fleet.settle(6)
    source = {"type": "Disk", "disk": {"path": "/models/trained-1"}}
    fleet.patch(control="Operator", weights={"version": "trained-1", "source": source})
    fleet.settle()
    assert [(one.version, one.path) for one in fleet.weights.history][-1] == ("trained-1", "/models/trained-1")
    assert fleet.boot.path == "/models/trained-1"
    assert set(fleet.serving().values()) == {"trained-1"}


def test_a_check_waits_for_an_engine_that_is_away_for_a_moment() -> None:
    fleet = Simulation()
    fleet.settle()
    away = next(pod.uid for pod in fleet.pods.values() if pod.engine is not None)
    fleet.kill_engine(away)
    fleet.patch(weightCheck={"requestID": "7", "action": "Checksum"})
    fleet.settle()
    check = fleet.rollout.status.last_weight_check
    assert check is not None
    assert (check.result, len(check.engines)) == ("Passed", 2)


def test_how_much_is_staged_is_told_until_the_move_is_decided() -> None:
    move = WeightTransaction(id="g2.1:2", version="2", staged_bytes=3_200_000_000, of_bytes=16_400_000_000, committed=1)
    staging = WeightsStatus(phase="Staging", transaction=move)
    assert move_detail(staging, 2) == ", 3.2 of 16.4 GB are staged on every engine"
    assert move_detail(staging.model_copy(update={"phase": "Committing"}), 2) == ", 1 of 2 engines are there"


def test_progress_of_staging_is_no_reason_to_write_the_status_at_once() -> None:
    def status(staged: int, prepared: int = 0, root: str = "") -> dict[str, Any]:
        move = WeightTransaction(id="m", staged_bytes=staged, prepared=prepared, root=root)
        return Status(weights=WeightsStatus(phase="Staging", transaction=move)).to_object()

    assert is_quiet(status(1), status(2, prepared=1))
    assert not is_quiet(status(1), status(1, root="r"))
