"""An engine pod without Kubernetes: the real agent and the real launcher as processes of this machine, in temporary
folders, with real SGLang on CPU. The test plays the kubelet and the operator."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from e2e.sglang_cpu import environment
from e2e.sglang_cpu.engine import CPU_ARGUMENTS, CPU_ENVIRONMENT, rank_environment
from sglang_rollout.agent.fault_points import ENV_FAULTS
from sglang_rollout.protocol import pod
from sglang_rollout.protocol.desired import AgentDesired, Execution
from sglang_rollout.protocol.launch import EngineRecord
from sglang_rollout.protocol.report import AgentReport, EngineState
from sglang_rollout.protocol.weights import WeightVersion
from sglang_rollout.protocol.wire import dumps, loads
from sglang_rollout.transfer.stage_index import ENV_FOLDER
from tests.free_ports import free_port
from tests.serving.cluster_keys import ClusterKey, write_fleet_file

SOURCES = Path(__file__).parents[2] / "operator"
START_SECONDS = 400.0
ANSWER_SECONDS = 60.0
CALL = aiohttp.ClientTimeout(total=ANSWER_SECONDS)


class LocalPod:
    """One pod of an engine. `address` is its own loopback address, so that several pods may use the same ports."""

    def __init__(
        self,
        folder: Path,
        boot: WeightVersion,
        *,
        rank: int = 0,
        nodes: int = 1,
        address: str = "127.0.0.1",
        tp: int = 0,
        staged_versions: int = 0,
    ) -> None:
        """tp: ranks of the engine, all in its pods; 0: one a pod. staged_versions: what its stage has room for, 0: it
        has none."""
        self.folder = folder
        self.boot = boot
        self.address = address
        self.engine_port = free_port()
        self.agent_port = free_port()
        self.key = ClusterKey("local")
        self.engine_args: list[str] = [*CPU_ARGUMENTS]
        self.rank = rank
        self.nodes = nodes
        self.tp = tp or nodes
        self.staged_versions = staged_versions
        self.stage_folder = Path("/dev/shm") / f"sglang-rollout-{os.getpid()}-{secrets.token_hex(4)}"
        self.faults = ""
        self._agent: subprocess.Popen[bytes] | None = None
        self._launcher: subprocess.Popen[bytes] | None = None
        self._session: aiohttp.ClientSession | None = None
        folder.mkdir(parents=True, exist_ok=True)
        fleet = folder / pod.FLEET_FILE
        fleet.write_bytes(dumps(replace(write_fleet_file(fleet, [self.key]), boot=boot)))

    # --- processes ---

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            **CPU_ENVIRONMENT,
            **(rank_environment(self.tp)),
            pod.ENV_RANK: str(self.rank),
            pod.ENV_NODES: str(self.nodes),
            pod.ENV_POD_UID: f"uid-{self.rank}",
            pod.ENV_POD_IP: self.address,
            pod.ENV_ENGINE_PORT: str(self.engine_port),
            pod.ENV_AGENT_PORT: str(self.agent_port),
            pod.ENV_RUN_DIR: str(self.folder / "run"),
            pod.ENV_STATE_DIR: str(self.folder / "state"),
            pod.ENV_FLEET_DIR: str(self.folder),
            pod.ENV_PROFILE_DIR: str(self.folder / "profiles"),
            pod.ENV_NAMESPACE: "local",
            pod.ENV_POD_NAME: "local-0",
            pod.ENV_TERMINATION_LOG: str(self.folder / "termination"),
            pod.ENV_SERVED_NAME: "tiny",
            pod.ENV_STARTUP_TIMEOUT: str(START_SECONDS),
            pod.ENV_DRAIN_SECONDS: "5",
            pod.ENV_STAGE_MEDIUM: "Host" if self.staged_versions else "None",
            pod.ENV_STAGE_VERSIONS: str(self.staged_versions or 1),
            ENV_FOLDER: str(self.stage_folder),
            ENV_FAULTS: self.faults,
            pod.ENV_TORCH_PYTHON: str(environment.interpreter()),
            "PYTHONPATH": str(SOURCES),
        }

    def _run(self, argv: list[str], log: str) -> subprocess.Popen[bytes]:
        with (self.folder / log).open("ab") as output:
            return subprocess.Popen(
                argv,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=_end_with_parent,
            )

    def start_agent(self) -> None:
        self._agent = self._run([sys.executable, "-m", "sglang_rollout.agent"], "agent.log")

    async def kill_agent(self) -> None:
        assert self._agent is not None
        self._agent.kill()
        await asyncio.to_thread(self._agent.wait)

    async def agent_ended(self, seconds: float = ANSWER_SECONDS) -> int:
        """Its exit code, once it has ended by itself."""
        assert self._agent is not None
        return await asyncio.to_thread(self._agent.wait, seconds)

    def start_launcher(self) -> None:
        """As the kubelet does when the engine container has ended, which it must have."""
        if self._launcher is not None:
            self._launcher.wait(30)
        launcher = SOURCES / "sglang_rollout" / "engine" / "launcher.py"
        self._launcher = self._run(
            [str(environment.interpreter()), str(launcher), "--", f"--tp-size={self.tp}", *self.engine_args],
            "engine.log",
        )

    async def launcher_ended(self) -> int:
        """The exit code of the engine container, once it has ended."""
        assert self._launcher is not None
        return await asyncio.wait_for(asyncio.to_thread(self._launcher.wait), START_SECONDS)

    async def stop(self) -> None:
        """Raises subprocess.TimeoutExpired; the stage's folder is gone all the same."""
        try:
            for process in (self._launcher, self._agent):
                if process is not None and process.poll() is None:
                    process.terminate()
                    await asyncio.to_thread(process.wait, 30)
            if self._session is not None:
                await self._session.close()
        finally:
            shutil.rmtree(self.stage_folder, ignore_errors=True)

    # --- what lies in the pod ---

    @property
    def record(self) -> EngineRecord:
        return loads(EngineRecord, (self.folder / "run" / pod.ENGINE_RECORD).read_bytes())

    def log(self, name: str) -> str:
        return (self.folder / name).read_text(errors="replace")

    # --- the operator's side ---

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=CALL)
        return self._session

    def desired(self, **changes: Any) -> AgentDesired:
        fields = {"lease_term": 1, "generation": 1, "boot": self.boot, "execution": Execution(), "probe_seconds": 60.0}
        return AgentDesired(**{**fields, **changes})

    async def drive(self, route: str, body: object, sub: str) -> tuple[int, str]:
        """A trainer's call through the agent to one of the engine's own routes."""
        headers = {"Authorization": f"Bearer {self.key.token(sub=sub)}"}
        url = f"http://{self.address}:{self.agent_port}{pod.PATH_ENGINE}/{route}"
        async with self.session.post(url, json=body, headers=headers) as response:
            return response.status, await response.text()

    async def _agent_call(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """Waits for an agent that is still starting."""
        headers = {"Authorization": f"Bearer {self.key.token()}"}
        url = f"http://{self.address}:{self.agent_port}{path}"
        for _ in range(int(ANSWER_SECONDS / 0.1)):
            try:
                async with self.session.request(method, url, data=body, headers=headers) as response:
                    answer = await response.read()
                    assert response.status == 200, answer
                    return answer
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.1)
        raise AssertionError(f"the agent does not answer; its log:\n{self.log('agent.log')}")

    async def put(self, desired: AgentDesired) -> AgentReport:
        return loads(AgentReport, await self._agent_call("PUT", pod.PATH_DESIRED, dumps(desired)))

    async def report(self, after: int = -1, wait: float = 0.0) -> AgentReport:
        path = f"{pod.PATH_REPORT}?after={after}&wait={wait}"
        return loads(AgentReport, await self._agent_call("GET", path))

    async def until(self, holds: Callable[[AgentReport], bool], seconds: float = ANSWER_SECONDS) -> AgentReport:
        report = await self.report()
        try:
            async with asyncio.timeout(seconds):
                while not holds(report):
                    report = await self.report(report.revision, 10.0)
        except TimeoutError:
            tail = "\n".join(self.log("agent.log").splitlines()[-20:])
            raise AssertionError(f"not within {seconds:g} s; last report: {report}\n{tail}") from None
        return report

    async def serving(self) -> AgentReport:
        return await self.until(lambda report: report.engine.state is EngineState.SERVING, START_SECONDS)

    # --- the client's side ---

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self.engine_port}"

    async def engine_call(self, method: str, path: str, body: object = None, key: str | None = None) -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with self.session.request(method, self.url + path, json=body, headers=headers) as response:
            return response.status, await response.text()

    async def admin_call(self, path: str, body: object) -> str:
        """The engine's answer to a call that only its agent may make; it must be a good one."""
        status, text = await self.engine_call("POST", path, body, self.record.admin_key)
        assert status == 200, text
        return text

    async def checksum(self) -> str:
        """SGLang's own, of all weights that the engine holds."""
        return str(json.loads(await self.admin_call("/weights_checker", {"action": "checksum"}))["per_engine_checksum"])

    async def generate(self, tokens: int, text: str = "What is 2 + 3?") -> dict[str, Any]:
        body = {
            "text": text,
            "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
        }
        status, answer = await self.engine_call("POST", "/generate", body, self.record.data_key)
        assert status == 200, answer
        return dict(json.loads(answer))

    async def stream(self, tokens: int) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a streamed answer, as they come."""
        body = {
            "text": "the router sends",
            "stream": True,
            "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
        }
        headers = {"Authorization": f"Bearer {self.record.data_key}"}
        async with self.session.post(f"{self.url}/generate", json=body, headers=headers) as response:
            assert response.status == 200
            async for line in response.content:
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))


def _end_with_parent() -> None:
    """Linux: SIGTERM when the process that started this one ends, however it ends (PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM)


@asynccontextmanager
async def serving_pod(folder: Path, boot: WeightVersion, **options: Any) -> AsyncIterator[LocalPod]:
    """A pod whose engine serves `boot`; its processes end with the context."""
    made = LocalPod(folder, boot, **options)
    made.start_agent()
    made.start_launcher()
    try:
        await made.serving()
        yield made
    finally:
        await made.stop()
