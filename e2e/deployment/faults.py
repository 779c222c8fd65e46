"""Faults of single containers and processes, from the node's side: no grace, no hooks, no word to anyone."""

from __future__ import annotations

from typing import Any

from e2e.cluster import Cluster
from e2e.deployment.errors import DeploymentError

# Ends SGLang's server, the launcher's (PID 1) first child, as the kernel's OOM killer would.
_KILL_ENGINE = """
import os, signal
def parent(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1]
    except OSError:
        return ""
children = [int(pid) for pid in os.listdir("/proc") if pid.isdecimal() and parent(pid) == "1"]
if children:
    os.kill(min(children), signal.SIGKILL)
    print(min(children))
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
