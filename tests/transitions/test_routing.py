"""By which version routers name an engine."""

from __future__ import annotations

from sglang_rollout.api import EngineStatus, WeightsStatus
from sglang_rollout.protocol.desired import GroupAssignment
from sglang_rollout.protocol.report import AgentReport, EngineReport, EngineState
from sglang_rollout.protocol.weights import WeightVersion
from sglang_rollout.transitions.engines import EngineView
from sglang_rollout.transitions.groups import GroupState
from sglang_rollout.transitions.observed import PodView
from sglang_rollout.transitions.routing import desired_workers
from sglang_rollout.transitions.weight_steps import WeightsPlan


def engine(index: int, version: str) -> EngineView:
    pod = PodView(f"f-e{index}-0", f"p{index}", index, ip=f"10.0.0.{index}")
    report = AgentReport(1, "a", pod.uid, 0, engine=EngineReport(EngineState.SERVING, "s", weight_version=version))
    name = f"f-e{index}"
    return EngineView(index, name, 1, True, EngineStatus(name=name), pods={0: pod}, reports={0: report})


def labels(closed: bool, *engines: EngineView) -> list[str]:
    groups = {one.index: GroupState(1, (), "s", 0, None, GroupAssignment(1, "p", "10.0.0.1")) for one in engines}
    status = WeightsStatus(version="1", phase="Committing")
    plan = WeightsPlan(status, WeightVersion("1", "/m"), holds=frozenset({0, 1}), closed=closed)
    return [worker.weight_version for worker in desired_workers(engines, groups, plan).workers]


def test_a_version_is_named_when_all_have_it_and_not_engine_by_engine() -> None:
    moved, waiting, other = engine(0, "2"), engine(1, "1"), engine(2, "0")
    assert labels(True, moved, waiting, other) == ["1", "1", "0"]
    assert labels(False, moved, waiting, other) == ["2", "1", "0"]
