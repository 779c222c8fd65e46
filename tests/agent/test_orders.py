"""Whose orders an agent takes: those meant for its own pod, as they were given; and what it tells without one."""

from __future__ import annotations

from dataclasses import replace

from sglang_rollout.agent.journal import Journal, OpenApply
from sglang_rollout.agent.process import JOURNAL_FILE
from sglang_rollout.protocol import pod as contract
from sglang_rollout.protocol.desired import AgentDesired, Execution, ExecutionState
from sglang_rollout.protocol.report import AgentReport
from sglang_rollout.protocol.wire import dumps, loads
from sglang_rollout.serving.private_file import write_private

from .fake_pod import FakePod, MakePod


async def order(pod: FakePod, desired: AgentDesired, meant: str | None = None) -> int:
    path = contract.PATH_DESIRED + ("" if meant is None else f"?{contract.QUERY_POD}={meant}")
    return (await pod.call("PUT", path, dumps(desired)))[0]


async def generation(pod: FakePod) -> int:
    _, body = await pod.call("GET", contract.PATH_REPORT)
    return loads(AgentReport, body).generation


async def test_an_order_for_the_pod_that_had_this_address_before_is_not_obeyed(make_pod: MakePod) -> None:
    pod = await make_pod()
    assert await order(pod, pod.desired(generation=5), meant="uid-of-another") == 421
    assert await generation(pod) == 0
    assert await order(pod, pod.desired(generation=5), meant=pod.settings.pod_uid) == 200
    assert await generation(pod) == 5


async def test_an_order_that_comes_after_its_successor_is_not_obeyed(make_pod: MakePod) -> None:
    pod = await make_pod()
    paused = pod.desired(generation=2, execution=Execution(ExecutionState.PAUSED), serial=8)
    assert await order(pod, paused) == 200
    assert await order(pod, pod.desired(generation=1, serial=7)) == 409
    assert await generation(pod) == 2
    assert await order(pod, replace(paused, generation=3, serial=9)) == 200
    assert await generation(pod) == 3


async def test_an_engine_of_unknown_bytes_is_told_of_without_an_order_too(serving: FakePod) -> None:
    """Its apply was begun, never read back, and then its order was withdrawn: its label proves nothing."""
    assert serving.engine is not None
    assert serving.record is not None
    await serving.put(serving.desired())
    await serving.stop_agent()
    path = serving.settings.state_dir / JOURNAL_FILE
    journal = loads(Journal, path.read_bytes())
    opened = OpenApply(serving.record.start_id, "m1", serving.boot)
    write_private(path, dumps(replace(journal, open_apply=opened)))
    await serving.start_agent()
    await serving.put(serving.desired(generation=2))
    report = await serving.until(lambda report: report.move is not None and report.engine.paused)
    assert report.move is not None
    assert report.move.dirty
    assert report.move.id == "m1"
    assert report.engine.weight_version == ""
