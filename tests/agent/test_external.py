"""control: External: a trainer drives the engine through the agent, which itself only looks, probes and reports."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest_asyncio

from sglang_rollout.protocol import pod as paths
from sglang_rollout.protocol.desired import Execution, ExecutionState
from sglang_rollout.protocol.fleet import FleetConfig
from sglang_rollout.protocol.memory import MemoryOrder, MemoryTag
from sglang_rollout.protocol.operations import Operation, OperationKind
from sglang_rollout.protocol.report import EngineState
from sglang_rollout.protocol.weights import Step, WeightMove
from sglang_rollout.protocol.wire import dumps, loads

from .conftest import Versions
from .fake_pod import FakePod

TRAINER = "system:serviceaccount:team-a:trainer"


@pytest_asyncio.fixture
async def external(serving: FakePod) -> FakePod:
    """A serving pod that is left to a trainer."""
    fleet = serving.settings.fleet_file
    config = loads(FleetConfig, fleet.read_bytes())
    fleet.write_bytes(dumps(replace(config, trust=replace(config.trust, trainers=[TRAINER]))))
    await serving.put(serving.desired(hands_off=True))
    return serving


async def drive(pod: FakePod, method: str, route: str, body: object = None, sub: str = TRAINER) -> tuple[int, bytes]:
    data = None if body is None else json.dumps(body).encode()
    return await pod.call(method, f"{paths.PATH_ENGINE}/{route}", data, token=pod.key.token(sub=sub))


async def test_a_trainer_drives_and_the_agent_reports(external: FakePod, versions: Versions) -> None:
    assert external.engine is not None
    rules = external.engine.rules
    assert (await drive(external, "POST", "pause_generation", {"mode": "retract"}))[0] == 200
    assert (await external.until(lambda r: r.engine.paused)).engine.state is EngineState.SERVING
    new = versions("2")
    update = {"model_path": new.path, "weight_version": "2"}
    assert (await drive(external, "POST", "update_weights_from_disk", update))[0] == 200
    await external.until(lambda r: r.engine.weight_version == "2")
    status, body = await drive(external, "GET", "model_info")
    assert (status, json.loads(body)["weight_version"]) == (200, "2")
    assert (await drive(external, "POST", "continue_generation", {}))[0] == 200
    await external.until(lambda r: not r.engine.paused)
    status, body = await drive(
        external, "POST", "generate", {"input_ids": [0], "sampling_params": {"max_new_tokens": 2}}
    )
    assert json.loads(body)["versions"] == ["2", "2"]
    assert rules.calls == ["pause retract", "load v2", "continue"]


async def test_the_agent_changes_nothing_by_itself(external: FakePod, versions: Versions) -> None:
    """Whatever is asked: the operator asks for nothing under External, and if it did, nothing would be done."""
    assert external.engine is not None
    asked = external.desired(
        hands_off=True,
        execution=Execution(ExecutionState.PAUSED),
        move=WeightMove("m", versions("2"), Step.CONTINUE),
        memory=MemoryOrder([MemoryTag.KV_CACHE]),
        operations=[Operation("c", OperationKind.CHECKSUM)],
        drain=True,
    )
    await external.put(asked)
    await asyncio.sleep(0.3)
    assert external.engine.rules.calls == []


async def test_a_pause_of_ours_is_left_to_the_trainer(serving: FakePod) -> None:
    assert serving.engine is not None
    await serving.put(serving.desired(execution=Execution(ExecutionState.PAUSED)))
    await serving.until(lambda r: r.engine.paused)
    await serving.put(serving.desired(hands_off=True))
    await asyncio.sleep(0.2)
    assert (await serving.report()).engine.paused
    serving.engine.rules.resume()
    serving.engine._resumed.set()
    await serving.until(lambda r: not r.engine.paused)
    await serving.put(serving.desired(generation=2))
    await asyncio.sleep(0.2)
    assert serving.engine.rules.calls == ["pause retract", "continue"]


async def test_released_memory_is_kept_in_mind(external: FakePod) -> None:
    """Its engine must not be probed, and not be routable; without a backup its weights are gone."""
    assert external.engine is not None
    rules = external.engine.rules
    await external.put(external.desired(hands_off=True, probe_seconds=0.1))
    await drive(external, "POST", "pause_generation", {"mode": "retract"})
    tags = {"tags": ["kv_cache", "weights"]}
    assert (await drive(external, "POST", "release_memory_occupation", tags))[0] == 200
    report = await external.until(lambda r: r.engine.released == [MemoryTag.KV_CACHE, MemoryTag.WEIGHTS])
    assert report.engine.weights_void == "released:1"
    assert report.engine.weight_version == ""
    tokens = rules.tokens
    await asyncio.sleep(0.4)
    assert rules.tokens == tokens
    assert (await drive(external, "POST", "resume_memory_occupation", tags))[0] == 200
    await external.until(lambda r: r.engine.released == [])
    assert (await external.call("GET", paths.PATH_READY))[0] == 503
    update = {"model_path": external.boot.path, "weight_version": "1"}
    assert (await drive(external, "POST", "update_weights_from_disk", update))[0] == 200
    await external.until(lambda r: r.engine.weights_void == "" and r.engine.weight_version == "1")
    assert not rules.violations


async def test_weights_count_only_with_the_label_that_was_read_after_them(
    external: FakePod, versions: Versions
) -> None:
    assert external.engine is not None
    external.engine.failures["/update_weights_from_disk"] = [500]
    update = {"model_path": versions("2").path, "weight_version": "2"}
    assert (await drive(external, "POST", "update_weights_from_disk", update))[0] == 500
    await external.until(lambda r: r.engine.weights_void == "trainer:update_weights_from_disk")
    external.engine.failures["/model_info"] = [500] * 60
    status, answer = await drive(external, "POST", "update_weights_from_disk", update)
    assert (status, b"nothing is served before their label is known" in answer) == (502, True)
    assert (await external.report()).engine.weight_version == ""
    external.engine.failures["/model_info"] = [500, 500]
    assert (await drive(external, "POST", "update_weights_from_disk", update))[0] == 200
    report = await external.until(lambda r: r.engine.weights_void == "")
    assert report.engine.weight_version == "2"


async def test_recovery_still_works(external: FakePod) -> None:
    assert external.engine is not None
    external.engine.rules.wedged = True
    await external.put(external.desired(hands_off=True, probe_seconds=0.3))
    await external.until(lambda r: r.engine.state is EngineState.ABSENT)
    assert external.kills
    status, body = await drive(external, "POST", "pause_generation", {"mode": "retract"})
    assert (status, b"the engine is Absent" in body) == (503, True)
    await external.launch()
    await external.serving()


async def test_who_may_drive(external: FakePod) -> None:
    stranger = "system:serviceaccount:team-b:trainer"
    assert (await drive(external, "POST", "flush_cache", {}, sub=stranger))[0] == 403
    assert (await external.call("POST", f"{paths.PATH_ENGINE}/flush_cache", b"{}", token="none"))[0] == 401
    assert (await drive(external, "POST", "flush_cache", {}))[0] == 200
    # The trainer may not speak as the operator does.
    token = external.key.token(sub=TRAINER)
    assert (await external.call("PUT", paths.PATH_DESIRED, dumps(external.desired()), token=token))[0] == 403
    assert (await external.call("GET", paths.PATH_REPORT, token=token))[0] == 403
    await external.put(external.desired(generation=2))
    status, body = await drive(external, "POST", "flush_cache", {})
    assert (status, b"set spec.control to External" in body) == (409, True)


async def test_an_update_that_fails_leaves_no_weights_to_serve_by(external: FakePod, versions: Versions) -> None:
    nowhere = {"model_path": "/models/nowhere", "weight_version": "2"}
    assert (await drive(external, "POST", "update_weights_from_disk", nowhere))[0] == 400
    report = await external.until(lambda r: bool(r.engine.weights_void))
    assert report.engine.weight_version == ""
    new = {"model_path": versions("2").path, "weight_version": "2"}
    assert (await drive(external, "POST", "update_weights_from_disk", new))[0] == 200
    report = await external.until(lambda r: not r.engine.weights_void)
    assert report.engine.weight_version == "2"


async def test_a_trainer_that_only_moves_the_weights_may_do_nothing_else(serving: FakePod, versions: Versions) -> None:
    fleet = serving.settings.fleet_file
    config = loads(FleetConfig, fleet.read_bytes())
    fleet.write_bytes(dumps(replace(config, trust=replace(config.trust, trainers=[TRAINER]))))
    await serving.put(serving.desired(open_door=True))
    status, body = await drive(serving, "POST", "pause_generation", {"mode": "retract"})
    assert status == 409
    assert "patch spec.execution" in json.loads(body)["error"]
    new = {"model_path": versions("2").path, "weight_version": "2"}
    assert (await drive(serving, "POST", "update_weights_from_disk", new))[0] == 200
    await serving.until(lambda r: r.engine.weight_version == "2")


async def test_an_engine_that_does_not_answer(external: FakePod) -> None:
    assert external.engine is not None
    await external.engine.stop()
    status, body = await drive(external, "POST", "flush_cache", {})
    assert (status, b"/flush_cache" in body) == (502, True)


async def test_unknown_tags_are_named(external: FakePod) -> None:
    assert external.engine is not None
    status, body = await drive(external, "POST", "release_memory_occupation", {"tags": ["everything"]})
    assert status == 400
    assert b"weights, kv_cache, cuda_graph" in body
    assert external.engine.rules.calls == []
