"""One SGLang server of this machine, with our loader, and the calls that the measurements make."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

from sglang_rollout.transfer.hook_call import LOADER, Action, HookCall, request_body
from sglang_rollout.transfer.hook_report import HookReport, read_reports
from sglang_rollout.transfer.stage_index import ENV_FOLDER

from .settings import Settings

START_SECONDS = 300
CALL_SECONDS = 120
KEPT_SECONDS = 3.0  # the server closes what is idle for five
OURS = Path(__file__).parents[2] / "operator"


class EngineFailed(Exception):
    """The engine ended, or answered something else than 200."""


class Engine:
    """A context manager: started on entry, which does not wait; ended on exit."""

    def __init__(self, settings: Settings, model: Path) -> None:
        self._settings = settings
        self._log = settings.out / "engine.log"
        self._transactions = 0
        self._connection: http.client.HTTPConnection | None = None
        self._used = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self.sessions = True
        self.version = ""
        packages = settings.work / "packages"
        packages.mkdir(exist_ok=True)
        if not (packages / "sglang_rollout").exists():
            (packages / "sglang_rollout").symlink_to(OURS / "sglang_rollout")
        self.stage_folder = settings.work / "stage"
        path = [*(p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != str(OURS)), str(packages)]
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
            "HF_HUB_OFFLINE": "1",
            ENV_FOLDER: str(self.stage_folder),
        }
        self._argv = [
            sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--load-format", "dummy",
            "--host", "127.0.0.1", "--port", str(settings.port), "--custom-weight-loader", LOADER,
            *settings.engine_arguments,
        ]  # fmt: skip
        if settings.cpu:
            from e2e.sglang_cpu.engine import CPU_ARGUMENTS, CPU_ENVIRONMENT

            self._argv += [a for a in CPU_ARGUMENTS if a not in settings.engine_arguments]
            self._environment |= CPU_ENVIRONMENT

    def __enter__(self) -> Engine:
        self._log.unlink(missing_ok=True)
        self.start()
        return self

    def start(self) -> None:
        """Does not wait. Also after kill()."""
        self._connection = None
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._argv,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self) -> None:
        """All of it at once, as the kernel would for want of memory."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(15)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(15)

    def wait_healthy(self) -> float:
        """Seconds from now. Raises EngineFailed with the end of its log."""
        begin = time.monotonic()
        while time.monotonic() - begin < START_SECONDS:
            if self._process is None or self._process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(self._settings.url + "/health", timeout=5):
                    self.version = str(self.get("/server_info").get("version", ""))
                    # Routes around an update came between these releases.
                    self.sessions = tuple(int(n) for n in self.version.split(".")[:3] if n.isdigit()) > (0, 5, 17)
                    return time.monotonic() - begin
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        lines = self._log.read_text(errors="replace").splitlines()[-30:]
        raise EngineFailed("the engine did not start:\n" + "\n".join(lines))

    # --- calls ---

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self._settings.url + path, timeout=CALL_SECONDS) as answer:
            return json.loads(answer.read())

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """On a connection that is kept, as an agent keeps its."""
        now = time.monotonic()
        if self._connection is None or now - self._used > KEPT_SECONDS:
            if self._connection is not None:
                self._connection.close()
            self._connection = http.client.HTTPConnection("127.0.0.1", self._settings.port, timeout=CALL_SECONDS)
            self._connection.connect()
            self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection.request("POST", path, json.dumps(body or {}), {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        text = answer.read()
        self._used = time.monotonic()
        if answer.status != 200:
            raise EngineFailed(f"{path} answered {answer.status}: {text[:300].decode()}")
        try:
            return json.loads(text)
        except ValueError:
            return text.decode()

    def begin(self) -> None:
        if self.sessions:
            self.post("/begin_weight_update", {"selector": "all"})

    def end(self) -> None:
        if self.sessions:
            self.post("/end_weight_update")

    def hook(self, action: Action, root: str = "", version: str = "", *, sums: bool = True) -> HookReport:
        """The report of the one rank. Raises EngineFailed when there is none."""
        self._transactions += 1
        call = HookCall(action, f"bench-{self._transactions}", version, root, sums=sums)
        self.post("/update_weights_from_tensor", request_body(call, 1))
        reports = read_reports(self.stage_folder, call.transaction, str(action))
        if len(reports) != 1:
            raise EngineFailed(f"the loader wrote {len(reports)} reports of {action}: see {self._log}")
        return reports[0]

    def hook_in_session(self, action: Action, root: str = "", version: str = "") -> HookReport:
        """While nothing runs: an update waits for running requests."""
        self.begin()
        try:
            return self.hook(action, root, version)
        finally:
            self.end()

    def outside_pause(self, action: Action, root: str = "") -> HookReport:
        """In a pause of its own, since an update waits for running requests otherwise."""
        self.post("/pause_generation", {"mode": "retract"})
        self.begin()
        try:
            return self.hook(action, root)
        finally:
            self.end()
            self.post("/continue_generation")

    def checker(self, action: str) -> Any:
        """SGLang's own checks of weights. Raises EngineFailed when it finds a difference."""
        return self.post("/weights_checker", {"action": action})

    def checksum(self) -> str:
        """SGLang's own, over everything; takes seconds on large models."""
        answer = self.checker("checksum")
        return str(answer.get("per_engine_checksum") or answer["ranks"][0].get("per_gpu_checksum"))
