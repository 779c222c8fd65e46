"""Faults of single containers and processes, from the node's side: no grace, no hooks, no word to anyone."""

from __future__ import annotations

from typing import Any

from e2e.cluster import Cluster
from e2e.deployment.errors import DeploymentError

# Finds SGLang's server process below the launcher (PID 1) and ends it as the kernel's OOM killer would.
_KILL_ENGINE = """
import os, signal
for pid in filter(str.isdecimal, os.listdir("/proc")):
    try:
        words = open(f"/proc/{pid}/cmdline", "rb").read().split(b"\\0")
    except OSError:
        continue
    if pid != "1" and b"sglang.launch_server" in words:
        os.kill(int(pid), signal.SIGKILL)
        print(pid)
"""


def kill_container(cluster: Cluster, pod: dict[str, Any], container: str) -> None:
    """SIGKILL the container's first process; the kubelet starts the container again."""
    status = pod["status"]
    known = [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]
    for one in known:
        if one["name"] == container and one.get("containerID"):
            identity = one["containerID"].rpartition("//")[2]
            cluster.docker("exec", pod["spec"]["nodeName"], "crictl", "stop", "--timeout", "0", identity, timeout=60)
            return
    raise DeploymentError(f"pod {pod['metadata']['name']} has no running container {container}")


def kill_engine(cluster: Cluster, pod: dict[str, Any]) -> None:
    """SIGKILL the SGLang server in the engine container; the launcher, its parent, sees it die."""
    meta = pod["metadata"]
    words = ("-n", meta["namespace"], "exec", meta["name"], "-c", "engine", "--", "python3", "-c", _KILL_ENGINE)
    if not cluster.kubectl(*words, timeout=60).strip():
        raise DeploymentError(f"pod {meta['name']} runs no SGLang server")
