"""kind: the cluster's description and the few commands that are needed of it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from e2e.cluster import gobuild
from e2e.cluster.docker import Engine
from e2e.cluster.errors import ClusterError
from e2e.cluster.layout import Layout
from e2e.cluster.node_image import kind_environment
from e2e.cluster.process import run

ROLES = ("control-plane", "worker", "worker")
NODES = ("control-plane", "worker", "worker2")
"""As kind names them, after "<cluster>-"."""


# Tests end the same container many times: the kubelet would make it wait longer after each, up to five minutes.
RESTART_SECONDS = 2
KUBELET = {
    "kind": "KubeletConfiguration",
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "featureGates": {"KubeletCrashLoopBackOffMax": True},
    "crashLoopBackOff": {"maxContainerRestartPeriod": f"{RESTART_SECONDS}s"},
}


@dataclass(frozen=True, order=True)
class Mount:
    """A path of this machine that every node sees, read-only."""

    host: str
    node: str

    @classmethod
    def parse(cls, text: str) -> Mount:
        """From HOST:NODE, both absolute."""
        host, colon, node = text.partition(":")
        if not colon or not host.startswith("/") or not node.startswith("/"):
            raise ClusterError(f"--mount {text}: write two absolute paths, HOST:NODE")
        return cls(host, node)


def describe(name: str, image: str, mounts: Sequence[Mount]) -> str:
    """The kind configuration of a cluster."""

    def node(role: str) -> dict[str, object]:
        extra = [{"hostPath": one.host, "containerPath": one.node, "readOnly": True} for one in sorted(mounts)]
        return {"role": role, "image": image, **({"extraMounts": extra} if extra else {})}

    nodes = [node(role) for role in ROLES]
    document = {
        "apiVersion": "kind.x-k8s.io/v1alpha4",
        "kind": "Cluster",
        "name": name,
        "nodes": nodes,
        "kubeadmConfigPatches": [yaml.safe_dump(KUBELET)],
    }
    return yaml.safe_dump(document, sort_keys=False)


def same_description(one: str, other: str) -> bool:
    """Do two configurations ask for the same cluster?"""
    return bool(yaml.safe_load(one) == yaml.safe_load(other))


def mounts_of(description: str) -> list[Mount]:
    """The mounts in a configuration that `describe` wrote."""
    document = yaml.safe_load(description)
    return [Mount(one["hostPath"], one["containerPath"]) for one in document["nodes"][0].get("extraMounts", [])]


@dataclass(frozen=True)
class Kind:
    """kind's commands for the cluster `name`, in the given Docker."""

    name: str
    engine: Engine
    layout: Layout

    def _run(self, *args: str | Path, timeout: float, log: Path | None = None) -> str:
        argv = [gobuild.binary(self.layout, "kind"), *args]
        return run(argv, timeout=timeout, env=kind_environment(self.engine), log=log).stdout

    def clusters(self) -> list[str]:
        """Names of the clusters in this Docker."""
        return self._run("get", "clusters", timeout=30).split()

    def create(self, description: Path, kubeconfig: Path, log: Path) -> None:
        """Create the cluster; when that fails, its logs are kept beside `log` and it is deleted."""
        files: list[str | Path] = ["--config", description, "--kubeconfig", kubeconfig]
        try:
            self._run("create", "cluster", *files, "--retain", "--wait=180s", timeout=600, log=log)
        except ClusterError as error:
            kept = log.with_suffix("")
            # Without a node there are no logs; the reason that counts is the first one.
            with contextlib.suppress(ClusterError):
                self._run("export", "logs", "--name", self.name, kept, timeout=120)
            self.delete(kubeconfig)
            raise ClusterError(f"{error}\nthe nodes' logs are in {kept}") from error

    def delete(self, kubeconfig: Path) -> None:
        self._run("delete", "cluster", "--name", self.name, "--kubeconfig", kubeconfig, timeout=180)

    def load_images(self, references: Sequence[str]) -> None:
        """Put images that Docker holds into all nodes; a node that has one already is left alone."""
        self._run("load", "docker-image", "--name", self.name, *references, timeout=900)

    def load_archive(self, archive: Path) -> None:
        self._run("load", "image-archive", "--name", self.name, archive, timeout=900)
