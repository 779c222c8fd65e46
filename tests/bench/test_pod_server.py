"""The fake pods' server, called as the operator calls pods."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import aiohttp
import pytest

from e2e.bench import pod_server
from e2e.bench.fake_pods import FakeAgent
from e2e.bench.pod_server import PodServer
from sglang_rollout.protocol import pod
from sglang_rollout.protocol.desired import AgentDesired, Execution, ExecutionState
from sglang_rollout.protocol.fleet import Trust
from sglang_rollout.protocol.report import AgentReport
from sglang_rollout.protocol.weights import WeightVersion
from sglang_rollout.protocol.wire import dumps, loads

BOOT = WeightVersion("1", "/models/1")
HEADERS = {"Authorization": "Bearer t"}
PORT = 31007


@pytest.fixture
async def agents(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[FakeAgent]]:
    monkeypatch.setattr(pod_server, "verify", lambda token, trust: "operator")
    found = [FakeAgent.serving(f"u{number}", f"127.0.0.{number}", BOOT) for number in (1, 2)]
    for agent in found:
        agent.port = PORT
    server = PodServer(Trust("audience", "issuer", ["operator"]))
    await server.start(found)
    yield found
    await server.stop()


def url(agent: FakeAgent, path: str, **query: str) -> str:
    words = "&".join(f"{name}={value}" for name, value in {pod.QUERY_POD: agent.uid, **query}.items())
    return f"http://{agent.address}:{PORT}{path}?{words}"


async def test_an_order_is_answered_and_a_long_poll_when_it_is_obeyed(agents: list[FakeAgent]) -> None:
    async with aiohttp.ClientSession(headers=HEADERS) as session:
        before = loads(AgentReport, await (await session.get(url(agents[1], pod.PATH_REPORT))).read())
        poll = asyncio.create_task(session.get(url(agents[1], pod.PATH_REPORT, after=str(before.revision), wait="30")))
        await asyncio.sleep(0.05)
        assert not poll.done()
        desired = replace(AgentDesired(1, 0, BOOT, Execution()), execution=Execution(ExecutionState.PAUSED))
        answer = await session.put(url(agents[1], pod.PATH_DESIRED), data=dumps(desired))
        assert answer.status == 200
        await poll
        seen = loads(AgentReport, await (await session.get(url(agents[1], pod.PATH_REPORT))).read())
        assert seen.engine.paused
        assert not agents[0].report.engine.paused


async def test_a_long_poll_ends_without_news_when_its_time_is_over(agents: list[FakeAgent]) -> None:
    async with aiohttp.ClientSession(headers=HEADERS) as session:
        revision = str(agents[0].report.revision)
        answer = await session.get(url(agents[0], pod.PATH_REPORT, after=revision, wait="0.05"))
        assert loads(AgentReport, await answer.read()) == agents[0].report


async def test_a_call_for_another_pod_and_one_without_a_token_are_refused(agents: list[FakeAgent]) -> None:
    async with aiohttp.ClientSession() as session:
        other = url(agents[0], pod.PATH_REPORT).replace("=u1", "=u9")
        assert (await session.get(other, headers=HEADERS)).status == 421
        assert (await session.get(url(agents[0], pod.PATH_REPORT))).status == 401
