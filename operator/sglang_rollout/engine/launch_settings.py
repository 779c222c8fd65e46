"""What the launcher is told by its pod, and the command and configuration of SGLang that follow from it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from sglang_rollout.protocol import pod
from sglang_rollout.transfer.hook_call import LOADER

CONFIG_FILE = "engine-config.yaml"
TERMINATION_LOG = "/dev/termination-log"
SERVE = Path(__file__).with_name("serve.py")
SITE = Path(__file__).resolve().parents[2]
PACKAGE = Path(__file__).resolve().parents[1]
HOOK_DIR = "hook"  # in the run folder: our package alone, for SGLang to import the weight loader from


@dataclass(frozen=True)
class LaunchSettings:
    """engine_args: SGLang's flags as the operator rendered them, without those that are added here."""

    run_dir: Path
    termination_log: Path
    engine_port: int
    rank: int
    nodes: int
    pod_ip: str
    served_name: str
    startup_timeout: float
    engine_args: tuple[str, ...]
    stage_medium: str = "None"

    @classmethod
    def read(cls, environment: Mapping[str, str], argv: Sequence[str]) -> LaunchSettings:
        """Raises ValueError, saying what is wrong."""
        if not argv or argv[0] != "--":
            raise ValueError("usage: launcher.py -- <flags of SGLang>")
        return cls(
            run_dir=Path(environment.get(pod.ENV_RUN_DIR, pod.RUN_DIR)),
            termination_log=Path(environment.get(pod.ENV_TERMINATION_LOG, TERMINATION_LOG)),
            engine_port=int(environment.get(pod.ENV_ENGINE_PORT, pod.ENGINE_PORT)),
            rank=int(environment.get(pod.ENV_RANK, "0")),
            nodes=int(environment.get(pod.ENV_NODES, "1")),
            pod_ip=environment.get(pod.ENV_POD_IP, ""),
            served_name=environment.get(pod.ENV_SERVED_NAME, ""),
            startup_timeout=float(environment.get(pod.ENV_STARTUP_TIMEOUT, "1800")),
            engine_args=tuple(argv[1:]),
            stage_medium=environment.get(pod.ENV_STAGE_MEDIUM, "None"),
        )

    @property
    def hook(self) -> bool:
        """Whether SGLang is started with the weight loader: wherever the pod has a stage."""
        return self.stage_medium != "None"

    def place_hook(self) -> None:
        """Makes the one folder of ours that SGLang may import from; the packages beside ours must not hide those of
        the image."""
        folder = self.run_dir / HOOK_DIR
        folder.mkdir(parents=True, exist_ok=True)
        link = folder / PACKAGE.name
        link.unlink(missing_ok=True)
        link.symlink_to(PACKAGE)

    def command(self, order: Mapping[str, Any]) -> list[str]:
        """SGLang's command for a protocol.launch.LaunchOrder on the wire. Values are joined to their flags by "=":
        a version label may begin with a dash."""
        flags = {
            "--config": str(self.run_dir / CONFIG_FILE),
            "--model-path": order["modelPath"],
            "--weight-version": order["weightVersion"],
            "--host": "::" if ":" in self.pod_ip else "0.0.0.0",  # noqa: S104 - the routers are other pods
            "--port": self.engine_port,
        }
        if self.served_name:
            flags["--served-model-name"] = self.served_name
        if self.nodes > 1:
            flags |= {
                "--nnodes": self.nodes,
                "--node-rank": self.rank,
                "--dist-init-addr": order["rendezvous"],
            }
        if self.hook:
            flags["--custom-weight-loader"] = LOADER
        saver = [] if self.on_cpu else _memory_flags(order.get("launch") or {})
        # SGLang looks for the word "--config" and takes the next one as its file.
        config = ["--config", str(flags.pop("--config"))]
        ours = [f"{flag}={value}" for flag, value in flags.items()]
        return [sys.executable, str(SERVE), *config, *self.engine_args, *ours, *saver, "--enable-metrics"]

    @property
    def on_cpu(self) -> bool:
        """The memory saver is a CUDA library: with its flag SGLang does not start on another device."""
        joined = " ".join(argument.replace("=", " ", 1) for argument in self.engine_args).split()
        return ("--device", "cpu") in pairwise(joined)

    def environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """SGLang's environment: without our packages, which must not hide those of the image; with the cheap
        /health, since the generating one hangs while paused and then calls the engine unhealthy."""
        mine = os.path.realpath(SITE)
        path = [p for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p and os.path.realpath(p) != mine]
        if self.hook:
            path.append(str(self.run_dir / HOOK_DIR))
        changed = {key: value for key, value in environment.items() if key != "PYTHONPATH"}
        if path:
            changed["PYTHONPATH"] = os.pathsep.join(path)
        return changed | {
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
            "PYTHONUNBUFFERED": "1",
        }


def _memory_flags(launch: Mapping[str, Any]) -> list[str]:
    """The flags of a protocol.memory.LaunchOptions on the wire."""
    flags = {"memorySaver": "--enable-memory-saver", "weightsBackup": "--enable-weights-cpu-backup"}
    return [flag for name, flag in flags.items() if launch.get(name)]


def key_config(data_key: str, admin_key: str) -> bytes:
    """SGLang's --config file (YAML, of which JSON is a part): keys in argv would be open to the whole pod."""
    return json.dumps({"api-key": data_key, "admin-api-key": admin_key}).encode()
