"""An engine pod on this machine's GPUs, or on CPU for a dry run: the shipped agent and launcher as processes, in the
shape that they have in a pod."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from e2e.agent.local_pod import SOURCES, START_SECONDS, LocalPod
from sglang_rollout.agent.fault_points import ENV_FAULTS
from sglang_rollout.agent.holder import HOLDER_FILE
from sglang_rollout.protocol import pod
from sglang_rollout.protocol.weights import WeightVersion
from sglang_rollout.transfer.stage_index import ENV_FOLDER

from .settings import GPU_ARGUMENTS

KIT = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]

WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
"""Ranks of an engine would use NVLink's multicast, which virtual machines that share a host must leave alone."""


class GpuPod(LocalPod):
    """gpus: as CUDA_VISIBLE_DEVICES, those of the engine first; its `tp` ranks and the stage are on as many, and
    the others are seen because their memory is copied from."""

    def __init__(
        self,
        folder: Path,
        boot: WeightVersion,
        *,
        gpus: str,
        tp: int = 1,
        name: str = "local-0",
        fraction: str = "0.35",
    ) -> None:
        super().__init__(folder, boot, tp=tp, staged_versions=2)
        self.engine_args = [*GPU_ARGUMENTS, "--mem-fraction-static", fraction]
        self.name = name
        self._gpus = gpus

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": self._gpus,
            pod.ENV_RANK: "0",
            pod.ENV_NODES: "1",
            pod.ENV_POD_UID: f"uid-{self.name}",
            pod.ENV_POD_IP: self.address,
            pod.ENV_ENGINE_PORT: str(self.engine_port),
            pod.ENV_AGENT_PORT: str(self.agent_port),
            pod.ENV_RUN_DIR: str(self.folder / "run"),
            pod.ENV_STATE_DIR: str(self.folder / "state"),
            pod.ENV_FLEET_DIR: str(self.folder),
            pod.ENV_PROFILE_DIR: str(self.folder / "profiles"),
            pod.ENV_NAMESPACE: "local",
            pod.ENV_POD_NAME: self.name,
            pod.ENV_TERMINATION_LOG: str(self.folder / "termination"),
            pod.ENV_SERVED_NAME: "bench",
            pod.ENV_STARTUP_TIMEOUT: str(START_SECONDS),
            pod.ENV_DRAIN_SECONDS: "5",
            pod.ENV_STAGE_MEDIUM: "Device",
            pod.ENV_STAGE_VERSIONS: "2",
            pod.ENV_STAGE_GPUS: ",".join(str(ordinal) for ordinal in range(self.tp)),
            ENV_FOLDER: str(self.stage_folder),
            ENV_FAULTS: self.faults,
            **WITHOUT_MULTICAST,
            # Which refuses to start an engine over two GPUs when a trainer is on one of them.
            "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false",
            pod.ENV_TORCH_PYTHON: sys.executable,
            "PYTHONPATH": os.pathsep.join([str(SOURCES), *(path for path in KIT if Path(path) != SOURCES)]),
        }

    async def stop(self) -> None:
        """The holder of a stage outlives its agent until the container ends, which is now."""
        holder = self.stage_folder / HOLDER_FILE
        pid = int(json.loads(holder.read_text())["pid"]) if holder.exists() else 0
        try:
            await super().stop()
        finally:
            if pid:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def start_launcher(self) -> None:
        launcher = SOURCES / "sglang_rollout" / "engine" / "launcher.py"
        words = [sys.executable, str(launcher), "--", f"--tp-size={self.tp}", *self.engine_args]
        self._launcher = self._run(words, "engine.log")


def intake_of(stage_folder: Path) -> int:
    """The process that receives for the agent of this stage. Raises LookupError."""
    found = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, timeout=10, check=True).stdout
    for line in found.splitlines():
        number, _, words = line.strip().partition(" ")
        if "sglang_rollout.transfer.intake_child" in words and str(stage_folder) in words:
            return int(number)
    raise LookupError(f"nothing receives for {stage_folder}: transfer something before")
