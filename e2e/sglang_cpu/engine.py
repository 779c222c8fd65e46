"""How to start SGLang on CPU: the command, and a running engine for tests."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from e2e.sglang_cpu import environment
from e2e.sglang_cpu.errors import SGLangCpuError

START_SECONDS = 300
"""A start takes 35 s alone on two cores, and several times that beside other work."""

CPU_ARGUMENTS = (
    "--device", "cpu",
    "--attention-backend", "torch_native",
    "--grammar-backend", "none",
    "--max-total-tokens", "16384",
    "--max-running-requests", "16",
    "--cuda-graph-backend-decode", "disabled",
    "--cuda-graph-backend-prefill", "disabled",
    "--random-seed", "1",
    "--sleep-on-idle",  # an idle scheduler would hold a core
)  # fmt: skip
"""What SGLang needs on CPU, and what keeps it small; the same words stand in the examples' spec.engine.args."""

CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # One thread a rank: more threads than cores stall each other for seconds.
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    # Otherwise /health generates a token, which a paused engine never does.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    # torch's CUDA build brings an NCCL that asks for a driver as soon as it is loaded.
    "SGLANG_NCCL_SO_PATH": "/nonexistent",
    # Compiling needs a C++ compiler, and minutes.
    "TORCHDYNAMO_DISABLE": "1",
}


def rank_environment(tp: int) -> dict[str, str]:
    """SGLang wants one group of CPUs a rank when there are more ranks than NUMA nodes, and none for one rank."""
    if tp == 1:
        return {}
    cpus = os.cpu_count() or 1
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank % cpus) for rank in range(tp))}


def engine_command(
    model_path: Path,
    port: int,
    *,
    tp: int = 1,
    nodes: int = 1,
    node_rank: int = 0,
    rendezvous: str | None = None,
    host: str = "127.0.0.1",
    api_key: str | None = None,
    admin_api_key: str | None = None,
    weight_version: str | None = None,
    extra: Sequence[str] = (),
) -> tuple[list[str], dict[str, str]]:
    """The argv and the added environment of one engine process.

    With `nodes` > 1 each node starts its own, with its `node_rank` and the same `rendezvous` ("address:port" that
    rank 0 binds); only rank 0 serves. Give both keys or none: with the admin key alone, SGLang tells it to anyone.
    """
    if (api_key is None) != (admin_api_key is None):
        raise SGLangCpuError("give both --api-key and --admin-api-key, or neither")
    if nodes > 1 and rendezvous is None:
        raise SGLangCpuError("an engine of several nodes needs --rendezvous ADDRESS:PORT, the same on each")
    argv = [str(environment.interpreter()), "-m", "sglang.launch_server", "--model-path", str(model_path)]
    argv += ["--host", host, "--port", str(port), *CPU_ARGUMENTS, "--enable-metrics"]
    if tp > 1:
        argv += ["--tp-size", str(tp)]
    if nodes > 1 and rendezvous is not None:
        argv += ["--nnodes", str(nodes), "--node-rank", str(node_rank), "--dist-init-addr", rendezvous]
    if api_key is not None and admin_api_key is not None:
        argv += ["--api-key", api_key, "--admin-api-key", admin_api_key]
    if weight_version is not None:
        argv += ["--weight-version", weight_version]
    return [*argv, *extra], {**CPU_ENVIRONMENT, **rank_environment(tp)}


@dataclass
class RunningEngine:
    """One engine process of this machine, as a context manager: started on entry, ended with its children on exit."""

    argv: Sequence[str]
    env: dict[str, str]
    port: int
    log: Path
    _process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> RunningEngine:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start it; does not wait until it serves."""
        with self.log.open("ab") as stream:
            self._process = subprocess.Popen(
                self.argv,
                env={**os.environ, **self.env},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    def wait_healthy(self, timeout: float = START_SECONDS) -> float:
        """Wait for 200 on /health; returns the seconds it took. Raises with the log's end when it fails."""
        begin = time.monotonic()
        while time.monotonic() - begin < timeout:
            if self._process is None or self._process.poll() is not None:
                raise SGLangCpuError(f"the engine ended while starting; {self._log_end()}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return time.monotonic() - begin
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise SGLangCpuError(f"the engine is not healthy after {timeout:.0f} s; {self._log_end()}")

    def stop(self) -> None:
        """End the whole process group; SGLang's children do not all follow a SIGTERM of their parent."""
        if self._process is None:
            return
        for number, patience in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 15.0)):
            if self._process.poll() is None:
                os.killpg(self._process.pid, number)
            try:
                self._process.wait(timeout=patience)
                break
            except subprocess.TimeoutExpired:
                continue
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process = None

    def _log_end(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-15:]
        return f"the end of {self.log}:\n  " + "\n  ".join(lines)


def _die_with_parent() -> None:
    """Linux: SIGKILL this process when the one that started it ends, however it ends (PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
