"""Faults of whole nodes: stopped, frozen, or cut off without a word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from e2e.cluster.docker import Engine
from e2e.cluster.errors import ClusterError
from e2e.cluster.kind import NODES

FAULTS = ("stop", "start", "pause", "unpause", "cut", "heal")

# What crosses the node's only interface is dropped in silence: no FIN, no RST. Inside the node all goes on, and
# `docker exec` still works, as it needs no network.
_CUT = """
add table inet cut
add chain inet cut arriving { type filter hook prerouting priority -400; }
add chain inet cut leaving { type filter hook postrouting priority 400; }
add rule inet cut arriving iifname "eth0" drop
add rule inet cut leaving oifname "eth0" drop
"""
_HEAL = "add table inet cut\ndelete table inet cut\n"


def node_name(cluster: str, node: str) -> str:
    """The full name of a node that may be given in short: worker2 for <cluster>-worker2."""
    if node in NODES:
        return f"{cluster}-{node}"
    if node in [f"{cluster}-{short}" for short in NODES]:
        return node
    raise ClusterError(f"no node {node}: write one of {', '.join(NODES)}")


@dataclass(frozen=True)
class Nodes:
    """The nodes of one cluster, as containers that can be hurt."""

    cluster: str
    engine: Engine

    def inflict(self, fault: str, node: str) -> None:
        """Do one of FAULTS to a node; returns when it is done, not when Kubernetes has noticed."""
        name = node_name(self.cluster, node)
        if fault in ("start", "pause", "unpause"):
            self.engine.docker(fault, name, timeout=60)
        elif fault == "stop":
            self.engine.docker("stop", "--time=10", name, timeout=60)
        elif fault == "cut":
            self._nft(name, _HEAL + _CUT)
        elif fault == "heal":
            self._nft(name, _HEAL)
        else:
            raise ClusterError(f"no fault {fault}: write one of {', '.join(FAULTS)}")

    def states(self) -> dict[str, str]:
        """Docker's word for each node: running, paused, exited, or missing."""
        template = "{{.State.Status}}"
        found = {}
        for short in NODES:
            name = node_name(self.cluster, short)
            shown = self.engine.docker("inspect", "-f", template, name, timeout=20, check=False)
            found[name] = shown.stdout.strip() if shown.returncode == 0 else "missing"
        return found

    def _nft(self, name: str, rules: str) -> None:
        # -i: without it nft would read nothing, and say nothing.
        self.engine.docker("exec", "-i", name, "nft", "-f", "-", stdin=rules, timeout=30)


def all_running(states: dict[str, str]) -> bool:
    return set(states.values()) == {"running"}


def images_and_archives(things: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split what is to be loaded into image references and archive files."""
    archives = [thing for thing in things if thing.endswith((".tar", ".tar.gz", ".tgz"))]
    return [thing for thing in things if thing not in archives], archives
