"""An engine that has missed a version gets it from another agent's stage, with real SGLang on CPU. The other agents are
stages served by the test."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web

from e2e.sglang_cpu import models
from sglang_rollout.agent.stage_door import StageDoor
from sglang_rollout.protocol.report import MoveReport
from sglang_rollout.protocol.weights import Source, SourceKind, Step, WeightMove, WeightVersion
from sglang_rollout.serving.errors import json_errors
from sglang_rollout.transfer.digests import BLAKE2B
from sglang_rollout.transfer.disk_reader import Reading, stage_checkpoint
from sglang_rollout.transfer.stage import reserve_host

from .local_pod import LocalPod, serving_pod

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

KEY = "of-this-fleet"
V1 = WeightVersion("1", str(models.path("qwen3-v1")))


class Peer:
    """An agent that keeps a version. `lies`: of one bucket, its bytes are others."""

    def __init__(self, folder: Path, model: str, *, lies: bool = False) -> None:
        self.stage = reserve_host(folder, 32 << 20, 1)
        reading = Reading(models.path(model), model, BLAKE2B, bucket_bytes=100_000)
        self.root = stage_checkpoint(self.stage, "a", reading).root
        self.address = ""
        self.asked = 0
        self._lies = lies
        self._runner: web.AppRunner | None = None

    async def open(self) -> Peer:
        @web.middleware
        async def meddle(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            self.asked += 1
            if self._lies and request.path.endswith("/buckets/2"):
                return web.Response(body=b"lie")
            return await handler(request)

        app = web.Application(middlewares=[json_errors, meddle])
        StageDoor(lambda: self.stage, lambda: KEY).serve(app)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.address = f"127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pod(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalPod]:
    async with serving_pod(tmp_path_factory.mktemp("pod"), V1, staged_versions=1) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def peers(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[Peer]]]:
    made: list[Peer] = []

    async def make(model: str, *, lies: bool = False) -> Peer:
        made.append(Peer(tmp_path / f"peer{len(made)}", model, lies=lies))
        return await made[-1].open()

    yield make
    for peer in made:
        await peer.close()
    shutil.rmtree(tmp_path, ignore_errors=True)


def kept(label: str, root: str, *peers: Peer, path: str = "") -> WeightMove:
    source = Source(SourceKind.KEPT, root=root, peers=[peer.address for peer in peers])
    return WeightMove(
        f"catch-up-{label}", WeightVersion(label, path), Step.CONTINUE, timeout_seconds=20.0, source=source
    )


async def ordered(pod: LocalPod, move: WeightMove, key: str = KEY) -> MoveReport:
    await pod.put(pod.desired(move=move, peer_key=key))
    report = await pod.until(
        lambda r: (
            r.move is not None and r.move.id == move.id and (r.move.reached is Step.CONTINUE or r.move.error != "")
        )
    )
    assert report.move is not None
    return report.move


async def test_what_a_peer_keeps_is_served_here(pod: LocalPod, peers: Callable[..., Awaitable[Peer]]) -> None:
    """Of a checkpoint that no folder holds; the first peer cannot give all of it."""
    liar, honest = await peers("qwen3-v2", lies=True), await peers("qwen3-v2")
    before = await pod.checksum()
    found = await ordered(pod, kept("2", honest.root, liar, honest))
    assert found.error == ""
    assert liar.asked > 2
    report = await pod.report()
    assert (report.engine.weight_version, report.engine.weights_root) == ("2", honest.root)
    assert [(one.version, one.root) for one in report.stage.held] == [("2", honest.root)]
    assert (await pod.generate(4))["meta_info"]["weight_version"] == "2"
    pulled = await pod.checksum()
    assert pulled != before
    path = str(models.path("qwen3-v2"))
    assert (await ordered(pod, WeightMove("disk", WeightVersion("disk", path), Step.CONTINUE))).error == ""
    assert await pod.checksum() == pulled


@pytest.mark.parametrize("why", ["nobody", "key", "lies", "other"])
async def test_without_an_honest_peer_the_old_version_serves(
    pod: LocalPod, peers: Callable[..., Awaitable[Peer]], why: str
) -> None:
    peer = await peers("qwen3-v3", lies=why == "lies")
    before, sum_before = (await pod.report()).engine.weight_version, await pod.checksum()
    root = "0" * 64 if why == "other" else peer.root
    chosen = [] if why == "nobody" else [peer]
    found = await ordered(pod, kept(f"3-{why}", root, *chosen), "another" if why == "key" else KEY)
    assert {"nobody": "", "key": "403", "lies": "ends after", "other": "are not staged here"}[why] in found.error
    assert not found.dirty
    await pod.put(pod.desired())
    report = await pod.until(lambda r: not r.engine.paused)
    assert report.engine.weight_version == before
    assert await pod.checksum() == sum_before
