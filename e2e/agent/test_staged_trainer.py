"""A trainer's weights by way of the stage into real SGLang on CPU: sent over gloo while the engine generates, applied
as what SGLang would read from the same checkpoint, and refused or made good when something is wrong with them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from e2e.sglang_cpu import environment, models
from sglang_rollout.protocol.report import AgentReport
from sglang_rollout.protocol.weights import Source, SourceKind, Step, WeightMove, WeightVersion

from .local_pod import LocalPod, serving_pod

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
V1 = WeightVersion("1", str(models.path("qwen3-v1")))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def local(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalPod]:
    async with serving_pod(tmp_path_factory.mktemp("pod"), V1, staged_versions=2) as made:
        yield made


class Trainer:
    """The process of staged_trainer."""

    def __init__(self, versions: dict[str, str], fault: str) -> None:
        folders = {label: str(models.path(name)) for label, name in versions.items()}
        self._process = subprocess.Popen(
            [str(environment.interpreter()), "-m", "e2e.agent.staged_trainer", json.dumps(folders), fault],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "operator"), str(ROOT)])},
            stdout=subprocess.PIPE,
            text=True,
        )

    async def line(self, word: str) -> str:
        assert self._process.stdout is not None
        while line := await asyncio.wait_for(asyncio.to_thread(self._process.stdout.readline), 300):
            if line.startswith(word + " "):
                return line.removeprefix(word).strip()
        raise AssertionError(f"the trainer ended without {word!r}")

    async def done(self) -> dict[str, Any]:
        return dict(json.loads(await self.line("done")))

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextmanager
def trainer(versions: dict[str, str], fault: str = "") -> Iterator[Trainer]:
    made = Trainer(versions, fault)
    try:
        yield made
    finally:
        made.end()


async def move(local: LocalPod, wanted: WeightMove) -> AgentReport:
    await local.put(local.desired(move=wanted))
    return await local.until(
        lambda r: (
            r.move is not None and r.move.id == wanted.id and (r.move.reached >= wanted.until or r.move.error != "")
        )
    )


def staged(version: str, port: str) -> WeightMove:
    source = Source(SourceKind.STAGED, [f"127.0.0.1:{port}"], members=1, epoch=1)
    return WeightMove(f"staged-{version}-{port}", WeightVersion(version, ""), Step.CONTINUE, source=source)


async def test_what_a_trainer_sends_is_what_the_engine_holds(local: LocalPod) -> None:
    first = await local.checksum()
    report = await move(local, WeightMove("disk", WeightVersion("2", str(models.path("qwen3-v2"))), Step.CONTINUE))
    second = await local.checksum()
    assert first != second
    with trainer({"sent-1": "qwen3-v1", "sent-2": "qwen3-v2"}) as sender:
        for label, expected in (("sent-1", first), ("sent-2", second)):
            port = await sender.line("port")
            busy = asyncio.create_task(local.generate(64))
            report = await move(local, staged(label, port))
            assert report.move is not None
            assert (report.move.error, report.engine.weight_version) == ("", label)
            assert (await sender.done())["root"] == report.move.root == report.engine.weights_root
            assert report.move.staged_bytes == report.move.of_bytes > 0
            assert await local.checksum() == expected
            assert (await local.generate(4))["meta_info"]["weight_version"] == label
            await busy
            print(f"prepared in {report.move.prepare_seconds} s, stall {report.move.stall_seconds} s")


@pytest.mark.parametrize(
    ("fault", "refused", "sentence"),
    [
        ("shape", True, "k_proj.weight"),
        ("missing", True, "k_proj.weight"),
        ("nan", True, "k_proj.weight"),
        ("exit", False, ""),
    ],
)
async def test_what_is_wrong_or_lost_never_reaches_the_engine(
    local: LocalPod, fault: str, refused: bool, sentence: str
) -> None:
    version = (await local.report()).engine.weight_version
    before = await local.checksum()
    with trainer({"bad": "qwen3-v3"}, fault) as sender:
        port = await sender.line("port")
        report = await move(local, staged("bad", port))
        assert report.move is not None
        assert sentence in report.move.error != ""
        assert (report.move.refused, report.move.dirty) == (refused, False)
        if fault != "exit":
            assert sentence in (await sender.done())["error"]
    assert "bad" not in [one.version for one in report.stage.held]
    assert await local.checksum() == before
    assert (await local.generate(4))["meta_info"]["weight_version"] == version


async def test_an_agent_killed_while_it_receives_leaves_trainer_and_engine_whole(local: LocalPod) -> None:
    before = await local.checksum()
    await local.kill_agent()
    local.faults = "stage:mid=exit"
    local.start_agent()
    await local.serving()
    with trainer({"lost": "qwen3-v3"}) as sender:
        wanted = staged("lost", await sender.line("port"))
        await local.put(local.desired(move=wanted))
        await local.agent_ended()
        local.faults = ""
        assert (await sender.done())["error"]
        local.start_agent()
        report = await local.until(lambda r: r.move is not None and r.move.error != "")
    assert report.move is not None
    assert not report.move.refused
    assert await local.checksum() == before
