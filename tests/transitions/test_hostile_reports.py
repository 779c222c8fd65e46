"""Reports come from pods that run images of tenants: whatever they say that is believed, the fleet is planned and its
status can be written."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_rollout.api import Status
from sglang_rollout.controller.plausibility import agent_problem
from sglang_rollout.protocol.memory import MemoryTag
from sglang_rollout.protocol.operations import OperationReport, OperationResult
from sglang_rollout.protocol.report import (
    AgentReport,
    EngineReport,
    EngineState,
    MoveReport,
    StagedWeights,
    StageReport,
)
from sglang_rollout.protocol.weights import Step

from .simulation import Simulation

ODD = ["", "default", "2", "x" * 5000, "\n", "s1", "catch-up:", "g1.1:2", "g2.1:2", "ahead.g2.1:2", "g.:"]
TEXT = st.one_of(st.text(max_size=20), st.sampled_from(ODD))
NUMBER = st.one_of(st.integers(0, 5), st.integers(0, 5), st.sampled_from([-1, 2**62]))
SECONDS = st.one_of(st.floats(0, 1e9), st.floats(0, 1e9), st.sampled_from([float("nan"), float("inf"), -1.0]))
ENGINES = st.builds(
    EngineReport,
    state=st.sampled_from(EngineState),
    start_id=TEXT,
    weight_version=TEXT,
    model_path=TEXT,
    data_key=TEXT,
    paused=st.booleans(),
    failure=TEXT,
    released=st.lists(st.sampled_from(MemoryTag), max_size=3, unique=True),
    weights_void=TEXT,
)
MOVES = st.builds(
    MoveReport,
    id=st.one_of(TEXT, st.sampled_from(["g2.1:2", "ahead.g2.1:2"])),
    reached=st.sampled_from(Step),
    error=TEXT,
    refused=st.booleans(),
    dirty=st.booleans(),
    aborted=st.booleans(),
    stall_seconds=SECONDS,
    root=TEXT,
    staged_bytes=NUMBER,
    of_bytes=NUMBER,
    nonfinite=NUMBER,
)
STAGES = st.builds(
    StageReport,
    held=st.lists(st.builds(StagedWeights, version=TEXT, root=TEXT, size=NUMBER), max_size=9),
    problem=TEXT,
)
OPERATIONS = st.builds(
    OperationReport,
    id=st.sampled_from(["check:1", "profile:1", "x"]),
    result=st.sampled_from(OperationResult),
    message=TEXT,
    tensors=st.lists(TEXT, max_size=3),
    differing=NUMBER,
    checksum=TEXT,
    sharding=TEXT,
    weight_version=TEXT,
)
REPORTS = st.builds(
    AgentReport,
    revision=NUMBER,
    agent_start=TEXT,
    pod_uid=TEXT,
    rank=NUMBER,
    lease_term=NUMBER,
    generation=NUMBER,
    incarnation=NUMBER,
    engine=ENGINES,
    move=st.none() | MOVES,
    probe_failure=TEXT,
    operations=st.lists(OPERATIONS, max_size=3),
    prepare=st.none() | MOVES,
    stage=STAGES,
    message=TEXT,
)


WAYS: dict[str, dict[str, Any]] = {
    "Disk": {"version": "2", "source": {"type": "Disk", "disk": {"path": "/models/v2"}}},
    "Staged": {"version": "2", "source": {"type": "Distributed", "distributed": {}}},
    "ahead": {"prepare": {"version": "2", "source": {"type": "Disk", "disk": {"path": "/models/v2"}}}},
}


@pytest.mark.parametrize("control", ["Disk", "Staged", "ahead", "External"])
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(rounds=st.lists(st.tuples(REPORTS, REPORTS), min_size=1, max_size=4))
def test_no_report_keeps_a_fleet_from_being_planned(
    control: str, rounds: list[tuple[AgentReport, AgentReport]]
) -> None:
    spec: dict[str, Any] = {"control": "External"} if control == "External" else {}
    fleet = Simulation(**spec)
    fleet.settle(6)
    if control != "External":
        fleet.patch(weights=WAYS[control], weightCheck={"requestID": "1", "action": "Compare"})
    pods = [pod.uid for pod in fleet.pods.values() if pod.engine_index is not None]
    for reports in rounds:
        believed = {uid: one for uid, one in zip(pods, reports, strict=True) if not agent_problem(one)}
        fleet.delivered_agents |= believed
        step = fleet.reconcile()
        Status.model_validate(step.status.to_object())


def test_odd_reports_are_told_apart() -> None:
    engine = EngineReport(start_id="s1")
    assert agent_problem(AgentReport(1, "a", "p", 0, engine=engine)) == ""
    odd = {
        "lease term 4611686018427387904": AgentReport(1, "a", "p", 0, lease_term=2**62),
        "incarnation -1": AgentReport(1, "a", "p", 0, incarnation=-1),
        "a weight version longer than 128 characters": AgentReport(
            1, "a", "p", 0, engine=EngineReport(weight_version="x" * 129)
        ),
        "something released twice": AgentReport(
            1, "a", "p", 0, engine=EngineReport(released=[MemoryTag.WEIGHTS, MemoryTag.WEIGHTS])
        ),
        "a stall of nan s": AgentReport(1, "a", "p", 0, move=MoveReport("m", stall_seconds=float("nan"))),
        "a digest longer than 128 characters": AgentReport(1, "a", "p", 0, prepare=MoveReport("m", root="x" * 129)),
        "-1 bytes or values": AgentReport(1, "a", "p", 0, move=MoveReport("m", of_bytes=-1)),
        "9 versions in its stage": AgentReport(1, "a", "p", 0, stage=StageReport([StagedWeights("1", "r")] * 9)),
        "a text longer than 65536 characters": AgentReport(1, "a", "p", 0, message="x" * 70_000),
    }
    assert {agent_problem(report) for report in odd.values()} == set(odd)
