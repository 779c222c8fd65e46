"""What the agent is told by its pod."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sglang_rollout.protocol import pod
from sglang_rollout.transfer.stage_index import DEFAULT_FOLDER, ENV_FOLDER


@dataclass(frozen=True)
class StageSettings:
    """Where and how new weights are kept before they are served. medium: Host (shared memory), Device (GPU memory) or
    None (nowhere). versions: 1 or 2. bucket_bytes: of what is read from a checkpoint at a time. gpus: ordinals, among
    those that this process sees, of the GPUs that a Device stage is kept on; (): all."""

    medium: str = "None"
    versions: int = 1
    bucket_bytes: int = 512 << 20
    folder: Path = Path(DEFAULT_FOLDER)
    gpus: tuple[int, ...] = ()

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> StageSettings:
        """Raises ValueError."""
        medium = environment.get(pod.ENV_STAGE_MEDIUM, "None")
        if medium not in ("Host", "Device", "None"):
            raise ValueError(f"{pod.ENV_STAGE_MEDIUM} must be Host, Device or None, not {medium!r}")
        return cls(
            medium,
            int(environment.get(pod.ENV_STAGE_VERSIONS, "1")),
            int(environment.get(pod.ENV_STAGE_BUCKET_BYTES, 1 << 30)),
            Path(environment.get(ENV_FOLDER, DEFAULT_FOLDER)),
            tuple(int(word) for word in environment.get(pod.ENV_STAGE_GPUS, "").split(",") if word),
        )


@dataclass(frozen=True)
class AgentSettings:
    """Ports and folders are the pod's own (protocol.pod) unless the environment says otherwise."""

    rank: int
    nodes: int
    pod_uid: str
    pod_ip: str
    engine_port: int = pod.ENGINE_PORT
    agent_port: int = pod.AGENT_PORT
    rendezvous_port: int = pod.RENDEZVOUS_PORT
    drain_seconds: float = 45.0
    run_dir: Path = Path(pod.RUN_DIR)
    state_dir: Path = Path(pod.STATE_DIR)
    fleet_file: Path = Path(pod.FLEET_DIR, pod.FLEET_FILE)
    profile_dir: Path = Path(pod.PROFILE_DIR)
    namespace: str = ""
    pod_name: str = ""
    stage: StageSettings = field(default_factory=StageSettings)
    torch_python: str = sys.executable

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> AgentSettings:
        """Raises KeyError for a variable that the manifests must set, ValueError for one that is no number."""
        return cls(
            rank=int(environment[pod.ENV_RANK]),
            nodes=int(environment[pod.ENV_NODES]),
            pod_uid=environment[pod.ENV_POD_UID],
            pod_ip=environment[pod.ENV_POD_IP],
            engine_port=int(environment.get(pod.ENV_ENGINE_PORT, pod.ENGINE_PORT)),
            agent_port=int(environment.get(pod.ENV_AGENT_PORT, pod.AGENT_PORT)),
            rendezvous_port=int(environment.get(pod.ENV_RENDEZVOUS_PORT, pod.RENDEZVOUS_PORT)),
            drain_seconds=float(environment.get(pod.ENV_DRAIN_SECONDS, "45")),
            run_dir=Path(environment.get(pod.ENV_RUN_DIR, pod.RUN_DIR)),
            state_dir=Path(environment.get(pod.ENV_STATE_DIR, pod.STATE_DIR)),
            fleet_file=Path(environment.get(pod.ENV_FLEET_DIR, pod.FLEET_DIR), pod.FLEET_FILE),
            profile_dir=Path(environment.get(pod.ENV_PROFILE_DIR, pod.PROFILE_DIR)),
            namespace=environment.get(pod.ENV_NAMESPACE, ""),
            pod_name=environment.get(pod.ENV_POD_NAME, ""),
            stage=StageSettings.read(environment),
            torch_python=environment.get(pod.ENV_TORCH_PYTHON, sys.executable),
        )
