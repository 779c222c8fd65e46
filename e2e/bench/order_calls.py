"""An order to all agents of a large fleet, by our own connections and by aiohttp's client: why there are both."""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection

import aiohttp

from e2e.bench.fake_pods import FakeAgent
from e2e.bench.figures import Section
from e2e.bench.played_fleet import address
from e2e.bench.pod_server import Call, PodServer
from sglang_rollout.controller.pod_connection import PodConnection
from sglang_rollout.protocol import pod
from sglang_rollout.protocol.desired import AgentDesired, Execution
from sglang_rollout.protocol.fleet import Trust
from sglang_rollout.protocol.weights import Step, WeightMove, WeightVersion
from sglang_rollout.protocol.wire import dumps

PORT = 31009
ROUNDS = 20
WARM_UP = 2
SECONDS = 30.0
BETWEEN_SECONDS = 0.2
TOKEN = "t" * 900
BOOT = WeightVersion("v0", "/models/v0")

Send = Callable[[int, str, bytes], Awaitable[int]]
"""Number of the agent, target and body of a PUT; returns the status of the answer."""


class _OpenServer(PodServer):
    """Asks nobody for a token."""

    def meant(self, call: Call) -> FakeAgent:
        found = self._pods[call.query[pod.QUERY_POD]]
        assert isinstance(found, FakeAgent)
        return found


async def measure(section: Section, engines: int) -> None:
    """Adds wall-clock and CPU time of an order to `engines` agents, answers included, for both, in turns."""
    ready, told = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(told, engines), daemon=True)
    process.start()
    await asyncio.to_thread(ready.recv)
    ours = [PodConnection(address(number), PORT, 1 << 20) for number in range(engines)]
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=75)
    try:
        async with aiohttp.ClientSession(connector=connector) as session:

            async def by_ours(number: int, target: str, body: bytes) -> int:
                return (await ours[number].call("PUT", target, TOKEN, body, SECONDS)).status

            async def by_aiohttp(number: int, target: str, body: bytes) -> int:
                headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
                timeout = aiohttp.ClientTimeout(total=SECONDS)
                url = f"http://{address(number)}:{PORT}{target}"
                async with session.put(url, data=body, headers=headers, timeout=timeout) as answer:
                    await answer.read()
                    return answer.status

            ways: dict[str, Send] = {"our own connections": by_ours, "aiohttp's client": by_aiohttp}
            times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
            for turn in range(WARM_UP + ROUNDS):
                for way, send in ways.items():
                    times[way].append(await _order(send, engines, turn))
            for way, found in times.items():
                wall, cpu = zip(*found[WARM_UP:], strict=True)
                section.add(f"an order to {engines} agents and their answers, by {way}", wall, "ms")
                section.add(f"the same: CPU of the caller (median), by {way}", [statistics.median(cpu)], "ms")
    finally:
        for connection in ours:
            connection.close()
        process.terminate()
        await asyncio.to_thread(process.join)


async def _order(send: Send, engines: int, turn: int) -> tuple[float, float]:
    """Milliseconds of wall-clock and of CPU time."""
    await asyncio.sleep(BETWEEN_SECONDS)
    move = WeightMove(f"m{turn}", WeightVersion(f"v{turn}", "/models/v1"), Step.PREPARE)
    body = dumps(AgentDesired(1, 1, BOOT, Execution(), move=move))
    wall, cpu = time.perf_counter(), time.process_time()
    answers = await asyncio.gather(
        *(send(number, f"{pod.PATH_DESIRED}?{pod.QUERY_POD}=u{number}", body) for number in range(engines))
    )
    assert set(answers) == {200}
    return 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)


def _serve(told: Connection, engines: int) -> None:
    async def run() -> None:
        agents = [FakeAgent.serving(f"u{number}", address(number), BOOT) for number in range(engines)]
        for agent in agents:
            agent.port = PORT
        await _OpenServer(Trust("", "", [])).start(agents)
        told.send("ready")
        await asyncio.Event().wait()

    asyncio.run(run())
