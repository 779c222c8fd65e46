"""The pods of a multi-node engine: who may start with whom, and what a member does when rank 0 starts again."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from sglang_rollout.protocol.desired import GroupAssignment
from sglang_rollout.protocol.launch import LaunchOrder
from sglang_rollout.protocol.report import EngineState
from sglang_rollout.protocol.weights import Step, WeightMove
from sglang_rollout.protocol.wire import loads
from tests.free_ports import free_port

from .conftest import Versions
from .fake_pod import FakePod, MakePod

GROUP = GroupAssignment(incarnation=3, rank0_pod_uid="uid-0", rank0_pod_ip="127.0.0.1", pods=["uid-0", "uid-1"])


@pytest_asyncio.fixture
async def group(make_pod: MakePod) -> list[FakePod]:
    port = free_port()
    return [
        await make_pod(rank=rank, nodes=2, ip=f"127.0.0.{rank + 1}", agent_port=port, rendezvous_port=30010)
        for rank in (0, 1)
    ]


async def launched(pod: FakePod, start_id: str) -> asyncio.Task[tuple[int, dict[str, Any]]]:
    task = asyncio.create_task(pod.ask_to_start(start_id))
    await pod.until(lambda r: r.engine.state is EngineState.WAITING or task.done())
    return task


async def run(pod: FakePod, start_id: str) -> None:
    status, order = await pod.ask_to_start(start_id)
    assert status == 200, order
    await pod.run_engine(start_id, loads(LaunchOrder, json.dumps(order)))
    await pod.serving()


async def test_all_start_at_rank_0s_address(group: list[FakePod]) -> None:
    asked = [await launched(pod, f"s{pod.settings.rank}") for pod in group]
    for pod in group:
        assert "has not assigned this pod" in (await pod.report()).engine.failure
        await pod.put(pod.desired(group=GROUP))
    for task in asked:
        status, order = await task
        assert (status, order["rendezvous"]) == (200, "127.0.0.1:30010")
    assert (await group[1].report()).incarnation == 3


@pytest.mark.parametrize(
    ("of_rank0", "of_rank1", "reason"),
    [
        (replace(GROUP, incarnation=2), GROUP, "rank 0 is of incarnation 2, this pod of 3"),
        (GROUP, replace(GROUP, incarnation=4), "rank 0 is of incarnation 3, this pod of 4"),
        (GROUP, replace(GROUP, rank0_pod_uid="gone"), "127.0.0.1 is pod uid-0, not rank 0 gone"),
        (GROUP, replace(GROUP, rank0_pod_ip="127.0.0.9"), "rank 0's agent does not answer at http://127.0.0.9:"),
        (GROUP, replace(GROUP, rank0_pod_ip="127.0.0.2"), "127.0.0.2 is pod uid-1, not rank 0 uid-0"),
    ],
)
async def test_a_member_starts_only_with_the_rank_0_it_was_assigned(
    group: list[FakePod], of_rank0: GroupAssignment, of_rank1: GroupAssignment, reason: str
) -> None:
    await group[0].put(group[0].desired(group=of_rank0))
    await group[1].put(group[1].desired(group=of_rank1))
    await run(group[0], "s0")
    task = await launched(group[1], "s1")
    await group[1].until(lambda r: reason in r.engine.failure)
    task.cancel()


async def test_rank_0_does_not_take_anothers_place(group: list[FakePod]) -> None:
    await group[0].put(group[0].desired(group=replace(GROUP, rank0_pod_uid="another")))
    task = await launched(group[0], "s0")
    await group[0].until(lambda r: "assigned pod another as rank 0" in r.engine.failure)
    task.cancel()


async def test_a_member_waits_for_rank_0s_launcher(group: list[FakePod]) -> None:
    for pod in group:
        await pod.put(pod.desired(group=GROUP))
    task = await launched(group[1], "s1")
    await group[1].until(lambda r: "rank 0's launcher has not asked" in r.engine.failure)
    await run(group[0], "s0")
    assert (await task)[0] == 200


async def test_a_member_starts_again_with_rank_0(group: list[FakePod]) -> None:
    for pod in group:
        await pod.put(pod.desired(group=GROUP))
        await run(pod, f"s{pod.settings.rank}")
    await group[0].end_engine("it crashed")
    await run(group[0], "again")
    await group[1].until(lambda r: r.engine.state is EngineState.ABSENT)
    assert group[1].kills == ["rank 0 of its engine started again"]
    await run(group[1], "s1-again")
    await asyncio.sleep(0.3)
    assert len(group[1].kills) == 1


@pytest.mark.parametrize("other", [{"pods": ["uid-0", "uid-2"]}, {"rank0_pod_ip": "127.0.0.9"}], ids=str)
async def test_an_engine_whose_group_is_of_other_pods_is_ended(group: list[FakePod], other: dict[str, Any]) -> None:
    for pod in group:
        await pod.put(pod.desired(group=GROUP))
        await run(pod, f"s{pod.settings.rank}")
    for pod in group:
        await pod.put(pod.desired(group=replace(GROUP, incarnation=4, **other)))
        await pod.until(lambda r: r.engine.state is EngineState.ABSENT)
        assert pod.kills == ["its group is of other pods now"]


async def test_an_engine_that_started_again_in_place_goes_on_under_its_next_incarnation(group: list[FakePod]) -> None:
    """The operator counts the start when it hears of it: that is after the process has joined."""
    for pod in group:
        await pod.put(pod.desired(group=GROUP))
        await run(pod, f"s{pod.settings.rank}")
    for pod in group:
        await pod.end_engine("it crashed")
    for pod in group:
        await run(pod, f"s{pod.settings.rank}-again")
    for pod in group:
        await pod.put(pod.desired(group=replace(GROUP, incarnation=4)))
        await pod.until(lambda r: r.incarnation == 4)
    await asyncio.sleep(0.3)
    assert [pod.kills for pod in group] == [[], []]


async def test_a_member_only_checks_the_checkpoint(group: list[FakePod], versions: Versions) -> None:
    for pod in group:
        await pod.put(pod.desired(group=GROUP))
        await run(pod, f"s{pod.settings.rank}")
    member = group[1]
    assert member.engine is not None
    await member.put(member.desired(group=GROUP, move=WeightMove("m1", versions("2"), Step.CONTINUE)))
    report = await member.until(lambda r: r.move is not None and r.move.reached is Step.CONTINUE)
    assert member.engine.rules.calls == []
    assert report.engine.weight_version == ""
    assert not report.engine.paused


async def test_a_launcher_is_sent_to_the_next_agent_at_once(group: list[FakePod]) -> None:
    task = await launched(group[0], "s0")
    await group[0].stop_agent()
    status, answer = await task
    assert (status, answer["error"]) == (425, "the agent ends")
