"""One engine pod in this process: the real agent with its sockets, a fake engine, and the launcher's side of it."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from sglang_rollout.agent.process import running_agent
from sglang_rollout.agent.settings import AgentSettings
from sglang_rollout.engine.local_http import LocalServer
from sglang_rollout.protocol import pod
from sglang_rollout.protocol.desired import AgentDesired, Execution
from sglang_rollout.protocol.launch import EngineRecord, LaunchOrder
from sglang_rollout.protocol.report import AgentReport, EngineState
from sglang_rollout.protocol.weights import WeightVersion
from sglang_rollout.protocol.wire import dumps, loads
from sglang_rollout.serving.private_file import write_private
from tests.free_ports import free_port
from tests.serving.cluster_keys import ClusterKey, write_fleet_file

from .fake_engine import EngineRules, FakeEngine

WAIT_SECONDS = 20.0
KEY = ClusterKey("k1")


async def eventually(holds: Callable[[], bool]) -> None:
    """Waits for something that no report tells."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not holds():  # noqa: ASYNC110 - what is waited for is a plain field of the fake engine
            await asyncio.sleep(0.002)


class FakePod:
    """`launch()` is a start of the engine container; `stop_agent()` and `start_agent()` are the agent's own."""

    def __init__(
        self, folder: Path, boot: WeightVersion, rank: int = 0, nodes: int = 1, ip: str = "127.0.0.1", **settings: Any
    ) -> None:
        self.folder = folder
        self.boot = boot
        self.key = KEY
        fleet_file = folder / pod.FLEET_FILE
        folder.mkdir(parents=True, exist_ok=True)
        fleet_file.write_bytes(dumps(replace(write_fleet_file(fleet_file, [self.key]), boot=boot)))
        self.settings = AgentSettings(
            rank=rank,
            nodes=nodes,
            pod_uid=f"uid-{rank}",
            pod_ip=ip,
            engine_port=free_port(),
            **{
                "agent_port": free_port(),
                "run_dir": folder / "run",
                "state_dir": folder / "state",
                "fleet_file": fleet_file,
                "profile_dir": folder / "profiles",
                "namespace": "team-a",
                "pod_name": f"fleet-e0-{rank}",
                "drain_seconds": 1.0,
                **settings,
            },
        )
        self.engine: FakeEngine | None = None
        self.record: EngineRecord | None = None
        self.kills: list[str] = []
        self.shared: dict[str, Any] = {}  # of every desired state
        self.refuses_kills = 0
        self.session: aiohttp.ClientSession | None = None
        self._agent: AsyncExitStack | None = None
        self._launcher: LocalServer | None = None

    # --- the agent ---

    async def start_agent(self) -> None:
        if self.session is None:
            self.session = aiohttp.ClientSession()
        self._agent = AsyncExitStack()
        await self._agent.enter_async_context(running_agent(self.settings, self.settings.pod_ip))

    async def stop_agent(self) -> None:
        if self._agent is not None:
            await self._agent.aclose()
            self._agent = None

    async def close(self) -> None:
        await self.stop_agent()
        await self.end_engine("closed")
        if self.session is not None:
            await self.session.close()

    # --- the engine container ---

    async def ask_to_start(self, start_id: str) -> tuple[int, dict[str, Any]]:
        socket = str(self.settings.run_dir / pod.AGENT_SOCKET)
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(path=socket)) as session,
            session.post(f"http://agent{pod.PATH_LAUNCH}", json={"startId": start_id}) as response,
        ):
            return response.status, await response.json()

    async def launch(self, **rules: Any) -> FakeEngine:
        start_id = secrets.token_hex(4)
        status, order = await self.ask_to_start(start_id)
        assert status == 200, order
        return await self.run_engine(start_id, loads(LaunchOrder, json.dumps(order)), **rules)

    async def run_engine(self, start_id: str, order: LaunchOrder, **rules: Any) -> FakeEngine:
        rules = {"backup": order.launch.weights_backup, **rules}
        rules.setdefault("stage", self.settings.stage.folder if self.settings.stage.medium != "None" else None)
        made = EngineRules(order.model_path, order.weight_version, f"d-{start_id}", f"a-{start_id}", **rules)
        self.engine = FakeEngine(made, self.settings.engine_port)
        self.engine.on_death = self._died
        await self.engine.start()
        self.record = EngineRecord(
            start_id, "2026-01-01T00:00:00", order, made.data_key, made.admin_key, made.stage is not None, 1
        )
        self._write_record()
        loop = asyncio.get_running_loop()

        def kill(message: dict[str, Any]) -> tuple[int, dict[str, Any]]:
            if message["startId"] != start_id:
                return 409, {"error": "another start"}
            self.kills.append(message["reason"])
            if self.refuses_kills:
                self.refuses_kills -= 1
                return 500, {"error": "told to refuse"}
            failure = "" if message.get("ordered") else message["reason"]
            asyncio.run_coroutine_threadsafe(self.end_engine(failure), loop)
            return 200, {}

        self._launcher = LocalServer(
            self.settings.run_dir / pod.LAUNCHER_SOCKET,
            {("GET", pod.PATH_START): lambda m: (200, {"startId": start_id}), ("POST", pod.PATH_KILL): kill},
            close_seconds=0.01,
        )
        return self.engine

    def _died(self) -> None:
        self._end_record("it died")

    async def end_engine(self, failure: str) -> None:
        if self.engine is not None:
            engine, self.engine = self.engine, None
            self._end_record(failure)
            await engine.stop()

    def _end_record(self, failure: str) -> None:
        launcher, self._launcher = self._launcher, None
        if launcher is not None:
            launcher.close()
        if self.record is not None and not self.record.exited:
            self.record = replace(self.record, exited=True, exit_code=1, failure=failure)
            self._write_record()

    def _write_record(self) -> None:
        assert self.record is not None
        write_private(self.settings.run_dir / pod.ENGINE_RECORD, dumps(self.record))

    # --- the operator's side ---

    def desired(self, **changes: Any) -> AgentDesired:
        fields = {"lease_term": 1, "generation": 1, "boot": self.boot, "execution": Execution(), "probe_seconds": 0.0}
        return AgentDesired(**{**fields, **self.shared, **changes})

    async def call(
        self, method: str, path: str, body: bytes | None = None, token: str | None = None
    ) -> tuple[int, bytes]:
        assert self.session is not None
        headers = {"Authorization": f"Bearer {self.key.token() if token is None else token}"}
        url = f"http://{self.settings.pod_ip}:{self.settings.agent_port}{path}"
        async with self.session.request(method, url, data=body, headers=headers) as response:
            return response.status, await response.read()

    async def put(self, desired: AgentDesired) -> AgentReport:
        status, body = await self.call("PUT", pod.PATH_DESIRED, dumps(desired))
        assert status == 200, body
        return loads(AgentReport, body)

    async def report(self, after: int = -1, wait: float = 0.0) -> AgentReport:
        status, body = await self.call("GET", f"{pod.PATH_REPORT}?after={after}&wait={wait}")
        assert status == 200, body
        return loads(AgentReport, body)

    async def until(self, holds: Callable[[AgentReport], bool]) -> AgentReport:
        """The first report for which it holds, by long poll as the operator does."""
        report = await self.report()
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                while not holds(report):
                    report = await self.report(report.revision, 5.0)
        except TimeoutError:
            raise AssertionError(f"not within {WAIT_SECONDS:g} s; the last report: {report}") from None
        return report

    async def serving(self) -> AgentReport:
        return await self.until(lambda report: report.engine.state is EngineState.SERVING)

    async def generate(self, tokens: int) -> dict[str, Any]:
        assert self.engine is not None
        assert self.session is not None
        headers = {"Authorization": f"Bearer {self.engine.rules.data_key}"}
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": tokens}}
        async with self.session.post(f"{self.engine.url}/generate", json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            return dict(await response.json())


MakePod = Callable[..., Awaitable[FakePod]]
