"""Agent and launcher with real SGLang on CPU: what they promise, on one pod without a cluster."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from e2e.sglang_cpu import models
from sglang_rollout.protocol.desired import Execution, ExecutionState
from sglang_rollout.protocol.report import AgentReport, EngineState
from sglang_rollout.protocol.weights import KVCache, PauseMode, Step, WeightMove, WeightVersion

from .local_pod import LocalPod, serving_pod

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

# Open by SGLang's own design: they hold no secret and let nobody generate. Prefixes, as its auth matches them.
OPEN = ("/health", "/ready", "/metrics")
# Routes that FastAPI serves beside those in its own description.
UNDESCRIBED = ["/docs", "/redoc", "/openapi.json", "/docs/oauth2-redirect"]
CONTROL = [
    "/pause_generation",
    "/continue_generation",
    "/flush_cache",
    "/abort_request",
    "/update_weights_from_disk",
    "/update_weights_from_tensor",
    "/update_weights_from_distributed",
    "/update_weight_version",
    "/begin_weight_update",
    "/end_weight_update",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/weights_checker",
    "/configure_logging",
    "/set_internal_state",
]


def version(label: str, model: str) -> WeightVersion:
    return WeightVersion(label, str(models.path(model)))


V1, V2, V3 = version("1", "qwen3-v1"), version("2", "qwen3-v2"), version("3", "qwen3-v3")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def local(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalPod]:
    """A pod whose engine serves version 1; the tests below leave it serving some version, not paused."""
    async with serving_pod(tmp_path_factory.mktemp("pod"), V1) as made:
        yield made


def continued(move_id: str, report: AgentReport) -> bool:
    return report.move is not None and report.move.id == move_id and report.move.reached is Step.CONTINUE


async def move(local: LocalPod, wanted: WeightMove) -> None:
    await local.put(local.desired(move=wanted, boot=wanted.weights))
    report = await local.until(
        lambda r: (
            r.move is not None and r.move.id == wanted.id and (r.move.reached is wanted.until or r.move.error != "")
        )
    )
    assert report.move is not None
    assert report.move.error == ""


async def test_the_engine_is_what_the_fleets_file_says(local: LocalPod) -> None:
    report = await local.report()
    assert (report.engine.weight_version, report.engine.model_path) == (V1.version, V1.path)
    assert report.engine.sglang_version.startswith("0.5.")
    assert not report.engine.paused
    assert (await local.generate(4))["meta_info"]["weight_version"] == "1"


async def test_every_route_asks_for_a_key(local: LocalPod) -> None:
    _, text = await local.engine_call("GET", "/openapi.json", key=local.record.data_key)
    described = json.loads(text)["paths"]
    routes = [(m.upper(), path) for path, methods in described.items() for m in methods]
    routes += [("GET", path) for path in UNDESCRIBED]
    assert len(routes) > 60
    for method, path in routes:
        if path.startswith(OPEN):
            continue
        target = re.sub(r"\{[^}]*\}", "x", path)
        for key in (None, "a-wrong-key"):
            status, answer = await local.engine_call(method, target, {}, key)
            assert status in (401, 403), f"{method} {path} with key {key}: {status} {answer[:200]}"
    assert {path for _, path in routes if path.startswith(OPEN)} == {"/health", "/health_generate", "/ready"}


async def test_websockets_ask_for_a_key(local: LocalPod) -> None:
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await local.session.ws_connect(f"{local.url}/v1/realtime")
    # 403 from our check; 401 where uvicorn has no WebSocket library and takes it for an HTTP request.
    assert refused.value.status in (401, 403)


async def test_the_data_key_neither_controls_nor_tells_the_admin_key(local: LocalPod) -> None:
    record = local.record
    for path in CONTROL:
        assert (await local.engine_call("POST", path, {}, record.data_key))[0] == 401, path
    _, text = await local.engine_call("GET", "/openapi.json", key=record.data_key)
    readable = [path for path, methods in json.loads(text)["paths"].items() if "get" in methods and "{" not in path]
    for path in [*readable, "/metrics"]:
        _, answer = await local.engine_call("GET", path, key=record.data_key)
        assert record.admin_key not in answer, path
        if path != "/openapi.json":
            assert record.data_key not in answer, path


async def test_keys_are_in_no_log_and_no_command_line(local: LocalPod) -> None:
    record = local.record
    for name in ("engine.log", "agent.log"):
        assert record.admin_key not in local.log(name)
        assert record.data_key not in local.log(name)
    assert "***" in local.log("engine.log")
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            assert record.admin_key.encode() not in command
            assert record.data_key.encode() not in command


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
async def test_a_pause_holds_a_stream_and_loses_nothing(local: LocalPod, mode: PauseMode) -> None:
    tokens = 400
    chunks, paused_at = [], None
    waiting = None
    async for chunk in local.stream(tokens):
        chunks.append(chunk)
        if len(chunks) == 20:
            await local.put(local.desired(execution=Execution(ExecutionState.PAUSED, mode)))
            report = await local.until(lambda r: r.engine.paused)
            assert report.engine.state is EngineState.SERVING
            waiting = asyncio.create_task(local.generate(4))
            paused_at = len(chunks)
            await asyncio.sleep(2.0)
            assert not waiting.done()
            await local.put(local.desired(generation=2))
    assert paused_at == 20
    assert waiting is not None
    assert (await waiting)["meta_info"]["completion_tokens"] == 4
    assert chunks[-1]["meta_info"]["completion_tokens"] == tokens
    assert not (await local.report()).engine.paused


@pytest.mark.parametrize(
    ("weights", "mode", "cache"),
    [
        (V2, PauseMode.RETRACT, KVCache.FLUSH),
        (V3, PauseMode.IN_PLACE, KVCache.KEEP),
        (V1, PauseMode.ABORT, KVCache.FLUSH),
    ],
)
async def test_a_move_changes_text_and_label_and_not_the_name(
    local: LocalPod, weights: WeightVersion, mode: PauseMode, cache: KVCache
) -> None:
    before = await local.generate(16)
    began = time.monotonic()
    await move(local, WeightMove(f"to-{weights.version}", weights, Step.CONTINUE, mode, cache))
    report = await local.report()
    print(f"{mode}: {time.monotonic() - began:.3f} s, stall {report.move and report.move.stall_seconds} s")
    after = await local.generate(16, "What is 2 + 3? ")
    again = await local.generate(16)
    assert after["meta_info"]["weight_version"] == again["meta_info"]["weight_version"] == weights.version
    if cache is KVCache.FLUSH:
        assert again["text"] != before["text"]
    _, listed = await local.engine_call("GET", "/v1/models", key=local.record.data_key)
    assert json.loads(listed)["data"][0]["id"] == "tiny"
    assert (report.engine.weight_version, report.engine.model_path) == (weights.version, weights.path)


async def test_a_stream_spans_a_move_and_says_so(local: LocalPod) -> None:
    chunks = []
    moving = None
    async for chunk in local.stream(400):
        chunks.append(chunk)
        if len(chunks) == 20:
            moving = asyncio.create_task(move(local, WeightMove("span", V2, Step.CONTINUE)))
    assert moving is not None
    await moving
    spans = chunks[-1]["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["1", "2"]
    assert spans[0]["end"] == spans[1]["start"]
    assert spans[1]["end"] == 400


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("qwen3-other-shape", "model.embed_tokens.weight is [384, "),
        ("qwen3-half-written", "is it still being written?"),
        ("qwen3-missing-shard", "is it still being written?"),
        ("llama-v1", "lack model.layers.0.self_attn.k_norm.weight"),
    ],
)
async def test_a_wrong_checkpoint_is_refused_and_the_old_weights_serve(
    local: LocalPod, model: str, sentence: str
) -> None:
    before = (await local.report()).engine.weight_version
    wanted = WeightMove(f"wrong-{model}", version("9", model), Step.CONTINUE)
    await local.put(local.desired(move=wanted))
    report = await local.until(lambda r: r.move is not None and r.move.id == wanted.id and r.move.error != "")
    assert report.move is not None
    assert report.move.refused
    assert not report.move.dirty
    assert sentence in report.move.error
    assert (await local.generate(4))["meta_info"]["weight_version"] == before


async def test_an_agent_killed_in_a_move_brings_it_to_its_end(local: LocalPod) -> None:
    """Killed with SIGKILL at other moments of it, from before the pause to after the apply."""
    for n, delay in enumerate((0.0, 0.02, 0.05, 0.1, 0.2)):
        weights = (V3, V2)[n % 2]
        wanted = WeightMove(f"killed-{n}", weights, Step.CONTINUE)
        await local.put(local.desired(move=wanted))
        await asyncio.sleep(delay)
        await local.kill_agent()
        local.start_agent()
        report = await local.until(partial(continued, wanted.id))
        assert (report.engine.weight_version, report.engine.paused) == (weights.version, False)
        assert (await local.generate(4))["meta_info"]["weight_version"] == weights.version


async def test_a_killed_engine_comes_back_at_the_version_of_the_last_order(local: LocalPod) -> None:
    await move(local, WeightMove("before-kill", V3, Step.CONTINUE))
    before = local.record
    os.kill(before.pid, signal.SIGKILL)
    assert await local.launcher_ended() != 0
    report = await local.until(lambda r: r.engine.state is EngineState.ABSENT)
    assert "SIGKILL" in report.engine.failure
    assert local.record.failure == report.engine.failure
    local.start_launcher()
    report = await local.serving()
    assert report.engine.weight_version == "3"
    after = local.record
    assert after.start_id != before.start_id
    assert (await local.engine_call("GET", "/model_info", key=before.data_key))[0] == 401
    assert (await local.generate(4))["meta_info"]["weight_version"] == "3"


async def test_a_stopped_pod_leaves_no_process(local: LocalPod) -> None:
    pid = local.record.pid
    group = [entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit() and _session_of(entry) == pid]
    assert len(group) >= 3
    await local.stop()
    assert not [entry for entry in group if Path("/proc", entry).exists()]


def _session_of(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[3])
    except (OSError, ValueError, IndexError):
        return 0


async def test_an_unknown_flag_is_named(tmp_path: Path) -> None:
    made = LocalPod(tmp_path, V1)
    made.engine_args.append("--no-such-flag")
    made.start_agent()
    made.start_launcher()
    try:
        assert await made.launcher_ended() == 2
        report = await made.until(lambda r: r.engine.failure != "")
        assert report.engine.failure == "SGLang ended with exit code 2: unrecognized arguments: --no-such-flag"
        assert made.log("termination") == report.engine.failure
    finally:
        await made.stop()
