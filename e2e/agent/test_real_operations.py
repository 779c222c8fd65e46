"""Pauses, memory, checks, profiles and a trainer's own control with real SGLang on CPU, on one pod without a cluster.
Releasing frees nothing there; what kills an engine kills it there as well."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from e2e.sglang_cpu import models
from sglang_rollout.protocol import pod
from sglang_rollout.protocol.desired import Execution, ExecutionState
from sglang_rollout.protocol.fleet import FleetConfig
from sglang_rollout.protocol.memory import LaunchOptions, MemoryOrder, MemoryTag
from sglang_rollout.protocol.operations import Operation, OperationKind, OperationReport, OperationResult
from sglang_rollout.protocol.report import AgentReport, EngineState
from sglang_rollout.protocol.weights import KVCache, PauseMode, Step, WeightMove, WeightVersion
from sglang_rollout.protocol.wire import dumps, loads

from .local_pod import LocalPod

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

SAVER = LaunchOptions(memory_saver=True)
ALL = sorted(MemoryTag)
TRAINER = "system:serviceaccount:local:trainer"
TOKENS = 1200  # a stream must outlast the step from running to paused on an idle machine


def version(label: str) -> WeightVersion:
    return WeightVersion(label, str(models.path(f"qwen3-v{label}")))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def local(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalPod]:
    """A pod whose engine was started for releasing memory; each test leaves it running at version 1."""
    made = LocalPod(tmp_path_factory.mktemp("pod"), version("1"))
    made.start_agent()
    await made.put(made.desired(launch=SAVER))
    made.start_launcher()
    try:
        await made.serving()
        yield made
    finally:
        await made.stop()


async def settled(local: LocalPod, name: str, **desired: Any) -> AgentReport:
    """Runs at version 1, everything resident, by a move of that name."""
    move = WeightMove(name, version("1"), Step.CONTINUE)
    await local.put(local.desired(launch=SAVER, memory=MemoryOrder([]), move=move, **desired))
    return await local.until(
        lambda r: (
            r.move is not None
            and (r.move.id, r.move.reached) == (name, Step.CONTINUE)
            and not (r.engine.paused or r.engine.released or r.engine.weights_void)
        )
    )


# --- what each pause means ---


async def paused_in_the_middle(local: LocalPod, mode: PauseMode) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """The chunks of a stream that is paused after some of them for two seconds; and what a request answered that came
    during the pause."""
    chunks: list[dict[str, Any]] = []
    waiting: asyncio.Task[dict[str, Any]] | None = None
    continuing: asyncio.Task[None] | None = None

    async def go_on() -> None:
        await asyncio.sleep(2.0)
        assert waiting is not None
        assert not waiting.done()
        await local.put(local.desired(launch=SAVER, generation=2))

    async for chunk in local.stream(TOKENS):
        chunks.append(chunk)
        if len(chunks) == 20:
            paused = Execution(ExecutionState.PAUSED, mode)
            await local.put(local.desired(launch=SAVER, execution=paused))
            await local.until(lambda r: r.engine.paused)
            waiting = asyncio.create_task(local.generate(4))
            continuing = asyncio.create_task(go_on())
    assert waiting is not None
    assert continuing is not None
    await continuing
    return chunks, await waiting


@pytest.mark.parametrize(
    ("mode", "reason", "retractions"),
    [(PauseMode.RETRACT, "length", 1), (PauseMode.IN_PLACE, "length", 0), (PauseMode.ABORT, "abort", None)],
)
async def test_what_a_pause_does_to_requests(
    local: LocalPod, mode: PauseMode, reason: str, retractions: int | None
) -> None:
    chunks, waited = await paused_in_the_middle(local, mode)
    last = chunks[-1]["meta_info"]
    assert last["finish_reason"]["type"] == reason
    if reason == "length":
        assert last["completion_tokens"] == TOKENS
        assert last["num_retractions"] == retractions
    else:
        assert last["completion_tokens"] < TOKENS
    assert waited is not None
    assert waited["meta_info"]["finish_reason"]["type"] == "length"


async def test_a_stronger_pause_takes_the_place_of_a_weaker_one(local: LocalPod) -> None:
    chunks: list[dict[str, Any]] = []
    async for chunk in local.stream(TOKENS):
        chunks.append(chunk)
        if len(chunks) == 20:
            for mode in (PauseMode.IN_PLACE, PauseMode.RETRACT):
                await local.put(local.desired(launch=SAVER, execution=Execution(ExecutionState.PAUSED, mode)))
                await local.until(lambda r: r.engine.paused)
                await asyncio.sleep(0.5)
            await local.put(local.desired(launch=SAVER, generation=2))
    assert chunks[-1]["meta_info"]["completion_tokens"] == TOKENS
    assert chunks[-1]["meta_info"]["num_retractions"] == 1


# --- memory ---


async def test_memory_is_released_from_a_busy_engine_and_comes_back(local: LocalPod) -> None:
    before = await local.generate(16)
    running = [asyncio.create_task(local.generate(200)) for _ in range(3)]
    await asyncio.sleep(0.3)
    order = MemoryOrder(ALL, drain_seconds=30.0)
    paused = Execution(ExecutionState.PAUSED)
    await local.put(local.desired(launch=SAVER, execution=paused, memory=order))
    report = await local.until(lambda r: r.engine.released == ALL and not r.message.startswith("step"))
    assert [answer["meta_info"]["completion_tokens"] for answer in await asyncio.gather(*running)] == [200] * 3
    assert (report.engine.paused, report.engine.weight_version) == (True, "")
    assert report.engine.weights_void.startswith("released:")
    await local.kill_agent()
    local.start_agent()
    assert (await local.serving()).engine.released == ALL
    await local.put(local.desired(launch=SAVER, memory=MemoryOrder([])))
    report = await local.until(lambda r: r.engine.released == [])
    assert (report.engine.paused, report.engine.weight_version) == (True, "")
    await settled(local, "after-release")
    assert (await local.generate(16))["text"] == before["text"]


async def test_what_does_not_end_is_aborted_and_the_engine_lives(local: LocalPod) -> None:
    start = local.record.start_id
    running = [asyncio.create_task(local.generate(3000)) for _ in range(2)]
    await asyncio.sleep(0.3)
    order = MemoryOrder([MemoryTag.KV_CACHE], drain_seconds=0.2)
    await local.put(local.desired(launch=SAVER, execution=Execution(ExecutionState.PAUSED), memory=order))
    await local.until(lambda r: r.engine.released == [MemoryTag.KV_CACHE])
    reasons = [answer["meta_info"]["finish_reason"]["type"] for answer in await asyncio.gather(*running)]
    assert reasons == ["abort", "abort"]
    await settled(local, "after-abort")
    assert local.record.start_id == start


# --- one-shot operations ---


async def done(local: LocalPod, operation: Operation, **desired: Any) -> OperationReport:
    await local.put(local.desired(launch=SAVER, operations=[operation], **desired))
    report = await local.until(lambda r: told(r, operation).result is not OperationResult.RUNNING)
    return told(report, operation)


def told(report: AgentReport, operation: Operation) -> OperationReport:
    """What the agent says of it. Those of other kinds, done before, are told as well."""
    return next((o for o in report.operations if o.id == operation.id), OperationReport(operation.id))


async def test_checks(local: LocalPod) -> None:
    first = await done(local, Operation("sum-1", OperationKind.CHECKSUM))
    assert first.result is OperationResult.PASSED
    assert "tp_size=1" in first.sharding
    assert (await done(local, Operation("snapshot", OperationKind.SNAPSHOT))).result is OperationResult.PASSED
    unsupported = await done(local, Operation("compare", OperationKind.COMPARE))
    assert unsupported.result is OperationResult.UNSUPPORTED
    assert "Compare needs a GPU here" in unsupported.message
    assert (await done(local, Operation("reset", OperationKind.RESET))).result is OperationResult.PASSED
    random_bytes = await done(local, Operation("sum-2", OperationKind.CHECKSUM))
    assert random_bytes.checksum != first.checksum
    assert (await local.report()).engine.weights_void == "reset:reset"
    await settled(local, "after-reset")
    again = await done(local, Operation("sum-3", OperationKind.CHECKSUM))
    assert again.checksum == first.checksum


async def test_a_profile(local: LocalPod) -> None:
    profile = Operation("profile:1", OperationKind.PROFILE, steps=5, timeout_seconds=120.0)
    await local.put(local.desired(launch=SAVER, operations=[profile]))
    await local.until(lambda r: profile.id in {o.id for o in r.operations})
    await asyncio.sleep(0.5)
    await local.generate(40)
    report = await done(local, profile)
    assert report.result is OperationResult.PASSED, report.message
    folder = local.folder / "profiles" / f"profile-1-{local.record.start_id}"
    assert list(Path(folder).glob("*.trace.json.gz"))
    assert f"local-0:{folder}" in report.message


async def test_a_flush_forgets_the_cache(local: LocalPod) -> None:
    # A prefix that is long enough to be kept, asked for twice.
    prompt = "the router sends a request to an engine and waits for its answer, " * 4
    await local.generate(4, prompt)
    assert (await local.generate(4, prompt))["meta_info"]["cached_tokens"] > 0
    assert (await done(local, Operation("flush-1", OperationKind.FLUSH))).result is OperationResult.PASSED
    assert (await local.generate(4, prompt))["meta_info"]["cached_tokens"] == 0


async def test_a_busy_engine_says_how_it_can_be_flushed(local: LocalPod) -> None:
    running = asyncio.create_task(local.generate(3000))
    await asyncio.sleep(0.3)
    busy = await done(local, Operation("flush-2", OperationKind.FLUSH, timeout_seconds=1.0))
    assert busy.result is OperationResult.ERROR
    assert "pause the fleet" in busy.message
    paused = Execution(ExecutionState.PAUSED)
    held = await done(local, Operation("flush-3", OperationKind.FLUSH, timeout_seconds=30.0), execution=paused)
    assert held.result is OperationResult.PASSED, held.message
    assert (await done(local, Operation("abort-1", OperationKind.ABORT))).result is OperationResult.PASSED
    assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"


async def test_an_abort_ends_running_and_queued_requests(local: LocalPod) -> None:
    running = [asyncio.create_task(local.generate(3000)) for _ in range(12)]
    await asyncio.sleep(0.5)
    assert (await done(local, Operation("abort-2", OperationKind.ABORT))).result is OperationResult.PASSED
    reasons = {answer["meta_info"]["finish_reason"]["type"] for answer in await asyncio.gather(*running)}
    assert reasons == {"abort"}
    assert (await local.generate(4))["meta_info"]["finish_reason"]["type"] == "length"


# --- a trainer that drives the engine ---


async def test_a_trainer_drives_the_engine(local: LocalPod) -> None:
    fleet = local.folder / pod.FLEET_FILE
    config = loads(FleetConfig, fleet.read_bytes())
    fleet.write_bytes(dumps(replace(config, trust=replace(config.trust, trainers=[TRAINER]))))
    assert (await local.drive("pause_generation", {"mode": "retract"}, TRAINER))[0] == 409
    await local.put(local.desired(launch=SAVER, hands_off=True))

    async def call(route: str, body: object) -> None:
        status, text = await local.drive(route, body, TRAINER)
        assert status == 200, f"{route}: {text}"

    await call("pause_generation", {"mode": "retract"})
    await local.until(lambda r: r.engine.paused)
    new = version("2")
    await call("update_weights_from_disk", {"model_path": new.path, "weight_version": "2", "flush_cache": False})
    await local.until(lambda r: r.engine.weight_version == "2")
    await call("continue_generation", {})
    await local.until(lambda r: not r.engine.paused)
    assert (await local.generate(4))["meta_info"]["weight_version"] == "2"
    await call("pause_generation", {"mode": "retract"})
    await call("release_memory_occupation", {"tags": ["kv_cache"]})
    await local.until(lambda r: r.engine.released == [MemoryTag.KV_CACHE])
    await call("resume_memory_occupation", {"tags": ["kv_cache"]})
    await call("continue_generation", {})
    await local.until(lambda r: not r.engine.paused and r.engine.released == [])
    await settled(local, "after-external")


# --- many orders ---


async def test_the_last_of_many_orders_holds_and_no_engine_dies(local: LocalPod) -> None:
    """Orders ten times a second, faster than the engine can follow, with requests running."""
    chance = random.Random(7)
    start = local.record.start_id
    running = [asyncio.create_task(local.generate(300)) for _ in range(3)]
    move = WeightMove("flip-0", version("1"), Step.CONTINUE)
    for n in range(100):
        if chance.random() < 0.1:
            move = WeightMove(f"flip-{n}", version(chance.choice("123")), Step.CONTINUE, *chance.choice(_MODES))
        execution = Execution(chance.choice(list(ExecutionState)), chance.choice(list(PauseMode)))
        tags = chance.choice([None, [], [], ALL, [MemoryTag.KV_CACHE]])
        memory = None if tags is None else MemoryOrder(tags, drain_seconds=0.3)
        await local.put(local.desired(launch=SAVER, generation=n + 2, execution=execution, memory=memory, move=move))
        await asyncio.sleep(0.1)
    report = await settled(local, "flips-end")
    assert report.engine.weight_version == "1"
    await asyncio.gather(*running)
    assert local.record.start_id == start
    assert (await local.generate(4))["meta_info"]["weight_version"] == "1"


_MODES = [
    (PauseMode.RETRACT, KVCache.FLUSH),
    (PauseMode.IN_PLACE, KVCache.KEEP),
    (PauseMode.ABORT, KVCache.FLUSH),
]


async def test_an_ordered_restart_lets_requests_end(local: LocalPod) -> None:
    start = local.record.start_id
    running = [asyncio.create_task(local.generate(400)) for _ in range(3)]
    await asyncio.sleep(0.3)
    paused = Execution(ExecutionState.PAUSED)
    await local.put(local.desired(launch=SAVER, execution=paused))
    await local.until(lambda r: r.engine.paused)
    await local.put(local.desired(launch=SAVER, execution=paused, restart_engine=start, restart_drains=True))
    assert [answer["meta_info"]["completion_tokens"] for answer in await asyncio.gather(*running)] == [400] * 3
    report = await local.until(lambda r: r.engine.state is EngineState.ABSENT)
    assert report.engine.failure == ""
    local.start_launcher()
    assert (await local.serving()).engine.start_id != start
