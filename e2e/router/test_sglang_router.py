"""Membership at a router that we do not run, here sglang-router 0.3.2, the last release under that name."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from e2e.router.engines import SmallEngine
from e2e.router.pods import START_SECONDS, Program, engines, until, worker
from sglang_rollout.protocol.routing import RouterDesired, RouterReport, Worker
from sglang_rollout.router.keeper import MembershipKeeper
from sglang_rollout.router.workers_api import WorkersApi
from tests.free_ports import free_port

pytestmark = [pytest.mark.router, pytest.mark.timeout(120)]

CREDENTIAL = "control-key"


class ExternalRouter:
    """The router as a process, and the operator's keeper of one fleet's workers there."""

    def __init__(self, python: Path, folder: Path, session: aiohttp.ClientSession) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        keys = ["--control-plane-api-keys", f"operator:operator:admin:{CREDENTIAL}"]
        flags = ["--port", str(port), "--prometheus-port", str(free_port()), "--policy", "round_robin", *keys]
        command: list[str | Path] = [python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", *flags]
        self.program = Program(command, folder / "router.log")
        self.session = session
        self.keeper = self.keeper_of("team-a/fleet")

    def keeper_of(self, fleet: str) -> MembershipKeeper:
        return MembershipKeeper(WorkersApi(self.session, self.url, lambda: CREDENTIAL, fleet), fleet, exclusive=False)

    async def in_step(self, *workers: Worker, keeper: MembershipKeeper | None = None) -> RouterReport:
        """Steps as the operator does, until the keeper sees the router in step."""
        async with asyncio.timeout(START_SECONDS):
            while True:
                report = await (keeper or self.keeper).step(RouterDesired(1, "set", list(workers)))
                if report.in_step:
                    return report
                await asyncio.sleep(0.05)

    async def served_by(self, count: int = 20) -> Counter[Any]:
        async def ask() -> Any:
            async with self.session.post(f"{self.url}/generate", json={"text": "hi"}) as response:
                return (await response.json())["meta_info"]["port"] if response.ok else response.status

        return Counter(await asyncio.gather(*(ask() for _ in range(count))))


@asynccontextmanager
async def external_router(python: Path, folder: Path) -> AsyncIterator[ExternalRouter]:
    async with aiohttp.ClientSession() as session:
        router = ExternalRouter(python, folder, session)
        await router.program.start()
        try:
            yield router
        finally:
            await router.program.stop(signal.SIGKILL)


async def test_membership_at_sglang_router(old_router: Path, tmp_path: Path) -> None:
    async with engines(3) as (first, second, foreign), external_router(old_router, tmp_path) as router:
        await router.in_step(worker(first, 0), worker(second, 1))
        assert set(await router.served_by()) == {first.port, second.port}

        # A worker of somebody else's is left alone, and not ours in the report.
        await router.in_step(worker(foreign, 0), keeper=router.keeper_of("team-b/fleet"))
        report = await router.in_step(worker(first, 0), worker(second, 1))
        assert {entry.url for entry in report.registered} == {first.url, second.url}
        assert set(await router.served_by()) == {first.port, second.port, foreign.port}

        # A new key takes the old one's place while a request waits.
        first.pause()
        asking = asyncio.create_task(router.served_by())
        await until(lambda: first.held > 0)
        first.key = "key-of-the-next-start"
        await router.in_step(worker(first, 0, incarnation=2), worker(second, 1))
        first.resume()
        assert set(await asking) == {first.port, second.port, foreign.port}
        assert set(await router.served_by()) == {first.port, second.port, foreign.port}
        assert first.refused == 0

        await router.in_step(replace(worker(first, 0, incarnation=2), weight_version="2"), worker(second, 1))
        await router.in_step(worker(second, 1))
        assert set(await router.served_by()) == {second.port, foreign.port}


async def test_a_restarted_router_gets_its_workers_back(old_router: Path, tmp_path: Path) -> None:
    async with engines(2) as pair, external_router(old_router, tmp_path) as router:
        workers = [worker(engine, index) for index, engine in enumerate(pair)]
        await router.in_step(*workers)
        await router.program.stop(signal.SIGKILL)
        report = await router.keeper.step(RouterDesired(1, "set", workers))
        assert not report.router_up
        assert "does not answer" in report.message
        await router.program.start()
        await router.in_step(*workers)
        assert set(await router.served_by()) == {engine.port for engine in pair}


async def test_a_wrong_credential_is_told(old_router: Path, tmp_path: Path) -> None:
    async with external_router(old_router, tmp_path) as router, aiohttp.ClientSession() as session:
        await router.in_step()
        wrong = MembershipKeeper(WorkersApi(session, router.url, lambda: "wrong", "f"), "f", exclusive=False)
        report = await wrong.step(RouterDesired(1, "set", [worker(SmallEngine())]))
        # It answers, so it may have workers: what it has is unknown, which is not the same as none.
        assert report.router_up
        assert not report.in_step
        assert "401" in report.message
