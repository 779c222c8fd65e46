"""Faults of single containers and processes, from the node's side: no grace, no hooks, no word to anyone."""

from __future__ import annotations

import signal
from typing import Any

from e2e.cluster import Cluster
from e2e.deployment.errors import DeploymentError

# Runs in the engine container. PID 1 is the launcher, its oldest child SGLang's server; `signal` goes to the server,
# or to all of its processes.
_SIGNAL = """
import os, signal, sys
def parent(pid):
    try:
        return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
    except OSError:
        return None
parents = {int(pid): parent(pid) for pid in os.listdir("/proc") if pid.isdecimal()}
server = min((pid for pid, above in parents.items() if above == 1), default=None)
tree = [server] if server else []
for pid in tree:
    tree += [child for child, above in parents.items() if above == pid]
number, all_of_it = int(sys.argv[1]), sys.argv[2] == "all"
for pid in tree if all_of_it else tree[:1]:
    os.kill(pid, number)
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
    """SIGKILL SGLang's server in the engine container, as the kernel's OOM killer would; the launcher sees it die."""
    _must_hit(pod, _signal(cluster, pod, signal.SIGKILL, "server"))


def freeze_engine(cluster: Cluster, pod: dict[str, Any]) -> None:
    """Stop all processes of SGLang: connections stay open and nothing answers, until `thaw_engine`."""
    _must_hit(pod, _signal(cluster, pod, signal.SIGSTOP, "all"))


def thaw_engine(cluster: Cluster, pod: dict[str, Any]) -> None:
    """Let a frozen engine go on; one that was killed meanwhile is left alone."""
    _signal(cluster, pod, signal.SIGCONT, "all")


def _signal(cluster: Cluster, pod: dict[str, Any], number: signal.Signals, which: str) -> bool:
    """Whether there was a process to send it to."""
    meta = pod["metadata"]
    words = ["-n", meta["namespace"], "exec", meta["name"], "-c", "engine", "--", "python3", "-c", _SIGNAL]
    return bool(cluster.kubectl(*words, str(int(number)), which, timeout=60).strip())


def _must_hit(pod: dict[str, Any], hit: bool) -> None:
    if not hit:
        raise DeploymentError(f"pod {pod['metadata']['name']} runs no SGLang server")
