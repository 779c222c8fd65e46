"""A router's pod as plain processes: the sidecar and smg behind its front, and an operator that calls the sidecar."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from e2e.router.engines import SmallEngine
from sglang_rollout.protocol import pod
from sglang_rollout.protocol.routing import RouterDesired, RouterReport, Worker
from sglang_rollout.protocol.wire import dumps, loads
from sglang_rollout.router import settings
from tests.free_ports import free_port
from tests.serving.cluster_keys import ClusterKey, write_fleet_file

START_SECONDS = 30.0
STOP_SECONDS = 30.0
REPOSITORY = Path(__file__).parents[2]


def worker(engine: SmallEngine, index: int = 0, *, key: str | None = None, incarnation: int = 1) -> Worker:
    return Worker(engine.url, key or engine.key, f"fleet-e{index}", incarnation, engine.version)


async def until(true: Callable[[], bool], seconds: float = START_SECONDS) -> None:
    """Waits until a condition holds that nothing else tells of. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


class Program:
    """A child process with its log in a file."""

    def __init__(self, argv: Sequence[str | Path], log: Path, env: dict[str, str] | None = None) -> None:
        self._argv = [str(word) for word in argv]
        self._env = {**os.environ, "PYTHONPATH": f"{REPOSITORY}/operator:{REPOSITORY}", **(env or {})}
        self.log = log
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv, env=self._env, stdout=log, stderr=log, start_new_session=True
            )

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """The exit code. SIGKILL ends the children as well, as it does in a container."""
        assert self._process is not None
        if self._process.returncode is None:
            if number == signal.SIGKILL:
                os.killpg(self._process.pid, number)
            else:
                self._process.send_signal(number)
        return await self.wait()

    async def wait(self) -> int:
        assert self._process is not None
        try:
            async with asyncio.timeout(STOP_SECONDS):
                return await self._process.wait()
        except TimeoutError:
            os.killpg(self._process.pid, signal.SIGKILL)
            raise


class RouterPod:
    """`url` is where clients send requests; `operator` calls the sidecar."""

    def __init__(
        self,
        python: Path,
        folder: Path,
        session: aiohttp.ClientSession,
        arguments: Sequence[str],
        client_keys: str = "",
    ) -> None:
        self.folder = folder
        self.session = session
        self.key = ClusterKey("cluster")
        self.port, self.gateway_port, self.sidecar_port = free_port(), free_port(), free_port()
        write_fleet_file(folder / pod.FLEET_FILE, [self.key])
        env = {
            pod.ENV_POD_UID: "router-pod",
            pod.ENV_RUN_DIR: str(folder),
            pod.ENV_FLEET_DIR: str(folder),
            pod.ENV_DRAIN_SECONDS: "20",
            settings.ENV_ROUTER_PORT: str(self.port),
            settings.ENV_GATEWAY_PORT: str(self.gateway_port),
            settings.ENV_METRICS_PORT: str(free_port()),
            settings.ENV_SIDECAR_PORT: str(self.sidecar_port),
        }
        if client_keys:
            (folder / "client.key").write_text(client_keys)
            env[pod.ENV_ROUTER_API_KEY_FILE] = str(folder / "client.key")
        launch: list[str | Path] = [python, "-m", "sglang_rollout.router.launch", *arguments]
        self.sidecar = Program([python, "-m", "sglang_rollout.router"], folder / "sidecar.log", env)
        self.router = Program(launch, folder / "router.log", env)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def want(self, *workers: Worker, name: str = "set", term: int = 1) -> RouterReport:
        """PUT the desired workers, as the operator does."""
        body = dumps(RouterDesired(term, name, list(workers)))
        return await self._ask("PUT", pod.PATH_DESIRED, body)

    async def report(self) -> RouterReport:
        return await self._ask("GET", pod.PATH_REPORT, None)

    async def _ask(self, method: str, path: str, body: bytes | None) -> RouterReport:
        headers = {"Authorization": f"Bearer {self.key.token()}"}
        url = f"http://127.0.0.1:{self.sidecar_port}{path}?{pod.QUERY_POD}=router-pod"
        async with self.session.request(method, url, data=body, headers=headers) as response:
            text = await response.text()
            assert response.status == 200, text
            return loads(RouterReport, text)

    async def in_step(self, name: str = "set") -> RouterReport:
        return await self.until(lambda report: report.desired_id == name and report.in_step)

    async def until(self, reached: Callable[[RouterReport], bool], seconds: float = START_SECONDS) -> RouterReport:
        """Waits for a report; says the last one when the time is over."""
        report = None
        try:
            async with asyncio.timeout(seconds):
                while True:
                    try:
                        report = await self.report()
                        if reached(report):
                            return report
                    except aiohttp.ClientError:
                        pass  # the sidecar is starting
                    await asyncio.sleep(0.02)
        except TimeoutError as error:
            raise AssertionError(f"not reached; last report: {report}") from error

    async def generate(self, headers: dict[str, str] | None = None, **body: Any) -> tuple[int, str]:
        async with self.session.post(f"{self.url}/generate", json={"text": "hi", **body}, headers=headers) as response:
            return response.status, await response.text()

    async def status_of(self, path: str, port: int | None = None, headers: dict[str, str] | None = None) -> int:
        url = f"http://127.0.0.1:{port or self.port}{path}"
        async with self.session.get(url, headers=headers) as response:
            return response.status


@asynccontextmanager
async def router_pod(
    python: Path,
    folder: Path,
    arguments: Sequence[str] = ("--policy=round_robin",),
    client_keys: str = "",
) -> AsyncIterator[RouterPod]:
    """A running pod; what its programs logged is printed when the test fails."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300)) as session:
        running = RouterPod(python, folder, session, arguments, client_keys)
        await running.sidecar.start()
        try:
            await running.router.start()
            try:
                await running.until(lambda report: report.router_up)
                yield running
            finally:
                await running.router.stop(signal.SIGKILL)
        finally:
            await running.sidecar.stop()
            for program in (running.sidecar, running.router):
                sys.stdout.write(f"--- {program.log.name}\n{program.log.read_text()}\n")


@asynccontextmanager
async def engines(count: int) -> AsyncIterator[list[SmallEngine]]:
    """Running engines, each with a key of its own."""
    started = [SmallEngine(key=f"key-{index}") for index in range(count)]
    for engine in started:
        await engine.start()
    try:
        yield started
    finally:
        for engine in started:
            engine.resume()
            await engine.stop()
