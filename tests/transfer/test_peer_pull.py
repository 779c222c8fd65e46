"""What one agent keeps, read by another: whole and equal, or nothing."""

from __future__ import annotations

import asyncio
import ctypes
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from sglang_rollout.agent import stage_door
from sglang_rollout.agent.stage_door import StageDoor
from sglang_rollout.protocol.pod import PATH_STAGE
from sglang_rollout.serving.errors import json_errors
from sglang_rollout.transfer import peer_pull
from sglang_rollout.transfer.hook_report import HookReport, write_report
from sglang_rollout.transfer.manifest import Manifest, Tensor
from sglang_rollout.transfer.peer_pull import PeersFailed, pull
from sglang_rollout.transfer.peer_reports import ReportsUnread, peer_reports
from sglang_rollout.transfer.stage import Stage, reserve_host
from sglang_rollout.transfer.stage_index import Region, StageUnusable, device_index

from .test_stage import SLOT, fill, staged_bytes
from .weights import some_weights

KEY = "the-fleet-s-key"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Keeper:
    """An agent that keeps a version; `meddle` sees every request before the door does. door_stage: given instead of
    `stage`."""

    stage: Stage
    manifest: Manifest
    door_stage: Stage | None = None
    address: str = ""
    meddle: Callable[[web.Request], Awaitable[web.StreamResponse | None]] | None = None


class Peers:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runners: list[web.AppRunner] = []
        self.session = aiohttp.ClientSession()
        self.here = reserve_host(folder / "here", SLOT, 2)
        self.slot = "b"
        self.progress: list[tuple[int, int]] = []

    async def keeper(self, seed: int = 1) -> Keeper:
        stage = reserve_host(self._folder / f"peer{len(self._runners)}", SLOT, 1)
        keeper = Keeper(stage, fill(stage, "a", some_weights(seed), "1"))

        @web.middleware
        async def meddle(request: web.Request, handler: Handler) -> web.StreamResponse:
            answer = await keeper.meddle(request) if keeper.meddle else None
            return answer or await handler(request)

        app = web.Application(middlewares=[json_errors, meddle])
        StageDoor(lambda: keeper.door_stage or stage, lambda: KEY).serve(app)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        self._runners.append(runner)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        keeper.address = f"127.0.0.1:{port}"
        return keeper

    async def pull(self, *keepers: Keeper, root: str = "", key: str = KEY, seconds: float = 10.0) -> Manifest:
        return await pull(
            self.session,
            [keeper.address for keeper in keepers],
            root or keepers[0].manifest.root,
            "1",
            key,
            self.here,
            self.slot,
            lambda done, of: self.progress.append((done, of)),
            seconds,
        )

    def held(self, manifest: Manifest) -> bool:
        return reserve_host(self.here.folder, SLOT, 2).holds(manifest.root)

    async def close(self) -> None:
        await self.session.close()
        for runner in self._runners:
            await runner.cleanup()


@pytest_asyncio.fixture
async def peers(tmp_path: Path) -> AsyncIterator[Peers]:
    made = Peers(tmp_path)
    yield made
    await made.close()


async def test_what_is_pulled_is_what_is_kept(peers: Peers) -> None:
    keeper = await peers.keeper()
    manifest = await peers.pull(keeper)
    assert manifest.root == keeper.manifest.root
    assert staged_bytes(peers.here.folder, manifest.root) == staged_bytes(keeper.stage.folder, manifest.root)
    assert peers.progress[-1] == (manifest.size, manifest.size)
    assert len(peers.progress) == len(manifest.buckets) > 2


@pytest.mark.parametrize("key", ["", "another", KEY + "x"])
async def test_only_the_fleet_s_agents_may_read(peers: Peers, key: str) -> None:
    keeper = await peers.keeper()
    with pytest.raises(PeersFailed, match=r"40[13]"):
        await peers.pull(keeper, key=key)
    for path in (f"{keeper.manifest.root}/buckets/0", "reports/t/check"):
        url = f"http://{keeper.address}{PATH_STAGE}/{path}"
        async with peers.session.get(url, headers={"Authorization": f"Bearer {key}"}) as answer:
            assert answer.status in (401, 403)


async def test_without_a_key_nobody_may(tmp_path: Path) -> None:
    app = web.Application(middlewares=[json_errors])
    stage = reserve_host(tmp_path, SLOT, 1)
    StageDoor(lambda: stage, lambda: "").serve(app)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}{PATH_STAGE}/r/manifest", headers={"Authorization": "Bearer "}) as answer,
    ):
        assert answer.status == 403
    await runner.cleanup()


async def test_a_peer_that_does_not_hold_it_is_passed_over(peers: Peers) -> None:
    other, keeper = await peers.keeper(seed=2), await peers.keeper(seed=1)
    manifest = await peers.pull(other, keeper, root=keeper.manifest.root)
    assert peers.held(manifest)


async def test_the_rest_comes_from_the_next_peer(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one is cut off after two buckets; those are not asked for again."""
    monkeypatch.setattr(peer_pull, "IN_FLIGHT", 1)
    first, second = await peers.keeper(), await peers.keeper()
    asked: list[str] = []

    async def cut(request: web.Request) -> web.StreamResponse | None:
        if request.path.endswith("/buckets/2"):
            assert request.transport is not None
            request.transport.abort()
        return None

    async def count(request: web.Request) -> web.StreamResponse | None:
        asked.append(request.path.rpartition("/")[2])
        return None

    first.meddle, second.meddle = cut, count
    manifest = await peers.pull(first, second)
    assert peers.held(manifest)
    assert asked == [str(number) for number in range(2, len(manifest.buckets))]


@pytest.mark.parametrize("given_up_at", ["manifest", "0", "1", "2"])
async def test_a_peer_that_gives_the_weights_up_meanwhile_is_passed_over(peers: Peers, given_up_at: str) -> None:
    first, second = await peers.keeper(), await peers.keeper()

    async def give_up(request: web.Request) -> web.StreamResponse | None:
        if request.path.rpartition("/")[2] == given_up_at:
            fill(first.stage, "a", some_weights(2), "2")
        return None

    first.meddle = give_up
    manifest = await peers.pull(first, second)
    assert staged_bytes(peers.here.folder, manifest.root) == staged_bytes(second.stage.folder, manifest.root)
    with pytest.raises(PeersFailed, match=f"weights with digest {manifest.root[:12]} are not staged here"):
        await peers.pull(first, root=manifest.root)


@pytest.mark.parametrize("lie", ["bytes", "short", "long", "manifest", "huge"])
async def test_a_peer_that_lies_changes_nothing(peers: Peers, lie: str) -> None:
    liar, honest = await peers.keeper(), await peers.keeper()

    async def meddle(request: web.Request) -> web.StreamResponse | None:
        number = request.path.rpartition("/")[2]
        if lie in ("manifest", "huge") and number == "manifest":
            return web.Response(body=b"{}" if lie == "manifest" else liar.manifest.to_json() + b" ")
        if number == "1" and lie not in ("manifest", "huge"):
            size = liar.manifest.buckets[1].size
            return web.Response(body=bytes({"bytes": size, "short": size - 1, "long": size + 1}[lie]))
        return None

    liar.meddle = meddle
    with pytest.raises(PeersFailed, match=r"manifest is not|has digest|ends after|has more bytes"):
        await peers.pull(liar)
    assert not peers.held(liar.manifest)
    manifest = await peers.pull(liar, honest)
    assert staged_bytes(peers.here.folder, manifest.root) == staged_bytes(honest.stage.folder, manifest.root)


async def test_a_slot_given_up_meanwhile_cuts_its_reader_off(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_door, "PIECE", 64)
    keeper = await peers.keeper()
    looks = 0
    real = stage_door._holds

    def given_up(*words: object) -> bool:
        nonlocal looks
        looks += 1
        if looks == 5:
            keeper.stage.write("a", keeper.manifest.algorithm)
        return real(*words)  # type: ignore[arg-type]

    monkeypatch.setattr(stage_door, "_holds", given_up)
    with pytest.raises(PeersFailed):
        await peers.pull(keeper)
    assert not peers.held(keeper.manifest)


class PlayedGpu:
    """The part of a driver that a stage needs; device memory is host memory here, one piece for each handle."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.memory = {handle: ctypes.create_string_buffer(size) for handle, size in sizes.items()}
        self.pinned = 0

    def open(self, handle: str) -> int:
        return ctypes.addressof(self.memory[handle])

    def copy_in(self, address: int, host: int, size: int) -> None:
        ctypes.memmove(address, host, size)

    def copy_out(self, host: int, address: int, size: int) -> None:
        ctypes.memmove(host, address, size)

    def register(self, host: int, size: int) -> None:
        self.pinned += 1


def on_gpus(folder: Path, gpu: PlayedGpu, handles: list[str]) -> Stage:
    device_index(folder, [[Region(SLOT, gpu=f"GPU-{handle}", handle=handle) for handle in handles]])
    return Stage(folder, gpu)  # type: ignore[arg-type]


async def test_from_gpu_memory_into_gpu_memory(peers: Peers, tmp_path: Path) -> None:
    gpu = PlayedGpu(dict.fromkeys("0123", SLOT))
    keeper = await peers.keeper()
    taken = await peers.pull(keeper)
    # A slot over two GPUs reads from one that lies in shared memory, and a third stage from that one.
    first, second = on_gpus(tmp_path / "first", gpu, ["0", "1"]), on_gpus(tmp_path / "second", gpu, ["2", "3"])
    peers.here, peers.slot = first, "a"
    assert (await peers.pull(keeper)).root == taken.root
    keeper.door_stage = first
    peers.here = second
    assert (await peers.pull(keeper)).root == taken.root
    assert any(gpu.memory["0"].raw)
    assert gpu.memory["2"].raw == gpu.memory["0"].raw
    assert gpu.memory["3"].raw == gpu.memory["1"].raw
    assert 0 < gpu.pinned <= 4 * peer_pull.IN_FLIGHT


async def test_a_reader_that_takes_nothing_holds_nobody_up(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    """More bytes than sockets take; the agent's loop goes on meanwhile, and it is cut off in the end."""
    monkeypatch.setattr(stage_door, "SEND_SECONDS", 0.3)
    ended, cut_off = asyncio.Event(), stage_door._cut_off

    def told(request: web.Request) -> None:
        cut_off(request)
        ended.set()

    monkeypatch.setattr(stage_door, "_cut_off", told)
    keeper = await peers.keeper()
    large = Tensor("large", "I8", (16 << 20,))
    keeper.door_stage = reserve_host(keeper.stage.folder.parent / "large", large.size, 1)
    root = fill(keeper.door_stage, "a", {"large": (large, bytes(large.size))}, "1").root
    host, _, port = keeper.address.partition(":")
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        reader.connect((host, int(port)))
        path = f"{PATH_STAGE}/{root}/buckets/0"
        reader.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode())
        url = f"http://{keeper.address}{PATH_STAGE}/{root}/manifest"
        async with peers.session.get(url, headers={"Authorization": f"Bearer {KEY}"}) as answer:
            assert answer.status == 200
        reader.settimeout(5.0)
        await asyncio.wait_for(ended.wait(), 10.0)
        got = 0
        while count := len(await asyncio.to_thread(reader.recv, 1 << 20)):
            got += count
        assert 0 < got < large.size


async def test_nothing_is_written_after_a_pull_was_cancelled(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a bucket: what the peer sends later goes nowhere."""
    monkeypatch.setattr(peer_pull, "IN_FLIGHT", 1)
    keeper = await peers.keeper()
    half, rest = asyncio.Event(), asyncio.Event()

    async def meddle(request: web.Request) -> web.StreamResponse | None:
        if not request.path.endswith("/buckets/1"):
            return None
        size = keeper.manifest.buckets[1].size
        answer = web.StreamResponse(headers={"Content-Length": str(size)})
        await answer.prepare(request)
        await answer.write(b"x" * (size // 2))
        half.set()
        await rest.wait()
        request.transport.abort()  # type: ignore[union-attr]
        return answer

    keeper.meddle = meddle
    pulling = asyncio.create_task(peers.pull(keeper))
    await half.wait()
    pulling.cancel()
    pulling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(pulling, 5.0)
    written = (peers.here.folder / "b.bytes").read_bytes()
    rest.set()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("peer-pull")]
    assert (peers.here.folder / "b.bytes").read_bytes() == written
    assert not peers.held(keeper.manifest)


async def test_a_silent_peer_ends_with_the_deadline(peers: Peers) -> None:
    keeper = await peers.keeper()

    async def hang(request: web.Request) -> web.StreamResponse | None:
        if "/buckets/" in request.path:
            await asyncio.sleep(30)
        return None

    keeper.meddle = hang
    began = asyncio.get_running_loop().time()
    with pytest.raises(PeersFailed, match=r"not within 0\.3 s"):
        await peers.pull(keeper, seconds=0.3)
    assert asyncio.get_running_loop().time() - began < 2


async def test_a_silent_peer_is_left_for_the_next(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_pull, "SILENCE_SECONDS", 0.2)
    silent, keeper = await peers.keeper(), await peers.keeper()

    async def hang(request: web.Request) -> web.StreamResponse | None:
        await asyncio.sleep(30)
        return None

    silent.meddle = hang
    assert peers.held(await peers.pull(silent, keeper))


async def test_no_peer_and_no_room_are_told(peers: Peers, tmp_path: Path) -> None:
    with pytest.raises(PeersFailed, match="there is none"):
        await peers.pull(root="0" * 64)
    keeper = await peers.keeper()
    peers.here = reserve_host(tmp_path / "small", 512, 2)
    with pytest.raises(StageUnusable, match="does not fit"):
        await peers.pull(keeper)


async def test_reports_of_another_pod(peers: Peers) -> None:
    keeper = await peers.keeper()
    report = HookReport("t", "check", 1, 2, "target", 7, problem="no stage", notes=("n",), layouts=("l",))
    write_report(keeper.stage.folder, report)
    assert await peer_reports(peers.session, keeper.address, KEY, "t", "check", 5.0) == [report]
    assert await peer_reports(peers.session, keeper.address, KEY, "t", "apply", 5.0) == []
    with pytest.raises(ReportsUnread, match="403"):
        await peer_reports(peers.session, keeper.address, "x", "t", "check", 5.0)
