"""The cluster as the demo and the tests use it: up, down, kubectl, images, node faults."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from e2e.cluster import gobuild
from e2e.cluster.docker import Daemon, Engine, engine
from e2e.cluster.errors import ClusterError
from e2e.cluster.kind import Kind, Mount, describe, mounts_of, same_description
from e2e.cluster.layout import Layout
from e2e.cluster.lock import exclusive
from e2e.cluster.mounts import remove_tree
from e2e.cluster.node_image import ensure_node_image
from e2e.cluster.nodes import Nodes, all_running, images_and_archives
from e2e.cluster.process import run, wait_for, write_atomically
from e2e.cluster.progress import say, step

DEFAULT_NAME = "sglang-rollout"
_NETWORK = "kind"


class Cluster:
    """Three kind nodes: one control plane, two workers. `mounts` None keeps those of a cluster that runs."""

    def __init__(
        self, name: str = DEFAULT_NAME, mounts: Sequence[Mount] | None = None, layout: Layout | None = None
    ) -> None:
        self.name = name
        self.layout = layout or Layout.default()
        self._mounts = mounts
        self._folder = self.layout.instance(name)

    @cached_property
    def engine(self) -> Engine:
        """The Docker that the nodes run in."""
        return engine(self.layout)

    @property
    def kubeconfig(self) -> Path:
        return self._folder / "kubeconfig"

    @property
    def nodes(self) -> Nodes:
        return Nodes(self.name, self.engine)

    @property
    def _kind(self) -> Kind:
        return Kind(self.name, self.engine, self.layout)

    @property
    def _description(self) -> Path:
        return self._folder / "kind.yaml"

    def up(self) -> None:
        """Return with all nodes Ready and names resolved. A healthy cluster of the same kind is kept."""
        with exclusive(self.layout.cluster / "instances" / f"{self.name}.lock", f"cluster {self.name}", timeout=5400):
            self.engine.start()
            image = ensure_node_image(self.engine, self.layout)
            gobuild.build(self.layout, (*gobuild.COMMANDS, gobuild.PROGRAMS["kubectl"]))
            wanted = describe(self.name, image, self._wanted_mounts())
            present = self._description.read_text() if self._description.exists() else ""
            if same_description(present, wanted) and self.healthy():
                say(f"cluster {self.name} is up")
                return
            self._create(wanted)

    def _wanted_mounts(self) -> list[Mount]:
        """What was asked for, and what the cluster has already: taking a mount away is no reason to start anew."""
        present = mounts_of(self._description.read_text()) if self._description.exists() else []
        for mount in self._mounts or ():
            if not Path(mount.host).exists():
                raise ClusterError(f"--mount {mount.host}:{mount.node}: {mount.host} does not exist")
        asked = {mount.node: mount for mount in self._mounts or ()}
        kept = [one for one in present if one.node not in asked and Path(one.host).exists()]
        return sorted([*asked.values(), *kept])

    def _create(self, description: str) -> None:
        if self.name in self._kind.clusters():
            with step(f"remove cluster {self.name}: it is stopped, broken or of another description"):
                self._kind.delete(self.kubeconfig)
        self._remember_network()
        write_atomically(self._description, description)
        log = self.layout.logs / f"kind-{self.name}.log"
        log.unlink(missing_ok=True)
        with step(f"create cluster {self.name}"):
            self._kind.create(self._description, self.kubeconfig, log)
            # One replica of CoreDNS: small machines, few names.
            self.kubectl("-n", "kube-system", "scale", "deployment/coredns", "--replicas=1")
            wait_for("all nodes to be Ready", self._nodes_ready, timeout=180)
            for deployment in ("kube-system/coredns", "local-path-storage/local-path-provisioner"):
                namespace, _, name = deployment.partition("/")
                self.kubectl("-n", namespace, "rollout", "status", f"deployment/{name}", timeout=180)

    def _remember_network(self) -> None:
        """In a Docker that is not ours, a network that was there before stays after `down`."""
        record = self._folder / "network"
        if not record.exists():
            listed = self.engine.docker("network", "ls", "--format", "{{.Name}}").stdout.split()
            write_atomically(record, "theirs" if _NETWORK in listed else "ours")

    def healthy(self) -> bool:
        """All nodes run and are Ready, and CoreDNS is available."""
        if not self.kubeconfig.exists() or not all_running(self.nodes.states()):
            return False
        try:
            shown = self.kubectl("-n", "kube-system", "get", "deployment", "coredns", "-o", "json", timeout=15)
            return self._nodes_ready() and json.loads(shown)["status"].get("availableReplicas", 0) >= 1
        except ClusterError:
            return False

    def _nodes_ready(self) -> bool:
        try:
            items = json.loads(self.kubectl("get", "nodes", "-o", "json", timeout=15))["items"]
        except ClusterError:
            return False
        conditions = [{one["type"]: one["status"] for one in item["status"]["conditions"]} for item in items]
        return len(items) == len(self.nodes.states()) and all(one.get("Ready") == "True" for one in conditions)

    def down(self, *, purge: bool = False) -> None:
        """Remove the cluster, then the private daemon with its networks and rules; `purge` also all that was built."""
        with exclusive(self.layout.cluster / "instances" / f"{self.name}.lock", f"cluster {self.name}", timeout=600):
            if isinstance(self.engine, Daemon):
                self._down_private(self.engine)
            else:
                self._delete_cluster()
            shutil.rmtree(self._folder, ignore_errors=True)
        if purge:
            with step(f"remove {self.layout.cluster}"):
                remove_tree(self.layout.cluster)

    def _down_private(self, private: Daemon) -> None:
        others: list[str] = []
        if private.running:
            others = self._delete_cluster()
        if others:
            say(f"the private Docker stays up for: {', '.join(others)}")
        else:
            private.stop()

    def _delete_cluster(self) -> list[str]:
        """Delete this cluster and, if nobody else uses it, its network; returns the clusters that remain."""
        if not gobuild.binary(self.layout, "kind").exists():
            return []
        if self.name in self._kind.clusters():
            with step(f"delete cluster {self.name}"):
                self._kind.delete(self.kubeconfig)
        others = self._kind.clusters()
        record = self._folder / "network"
        if not others and record.exists() and record.read_text() == "ours":
            self.engine.docker("network", "rm", _NETWORK, check=False)
        return others

    def kubectl(self, *args: str, timeout: float = 60, stdin: str | None = None, check: bool = True) -> str:
        """Run kubectl against this cluster and return what it prints."""
        command = gobuild.binary(self.layout, "kubectl")
        env = {"KUBECONFIG": str(self.kubeconfig)}
        return run([command, *args], timeout=timeout, env=env, stdin=stdin, check=check).stdout

    def docker(self, *args: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
        """Run docker against the daemon of the nodes."""
        return self.engine.docker(*args, timeout=timeout)

    def load(self, *things: str) -> None:
        """Put images into all nodes: references that Docker holds, or archives (.tar)."""
        references, archives = images_and_archives(things)
        if references:
            self._kind.load_images(references)
        for archive in archives:
            self._kind.load_archive(Path(archive))

    def node_stop(self, node: str) -> None:
        """Switch the node off."""
        self.nodes.inflict("stop", node)

    def node_start(self, node: str) -> None:
        """Switch a stopped node on."""
        self.nodes.inflict("start", node)

    def node_pause(self, node: str) -> None:
        """Freeze all processes of the node; its connections stay open."""
        self.nodes.inflict("pause", node)

    def node_unpause(self, node: str) -> None:
        """Let a frozen node go on."""
        self.nodes.inflict("unpause", node)

    def node_cut(self, node: str) -> None:
        """Drop what the node sends and receives, in silence."""
        self.nodes.inflict("cut", node)

    def node_heal(self, node: str) -> None:
        """Undo `node_cut`."""
        self.nodes.inflict("heal", node)

    def environment(self) -> dict[str, str]:
        """KUBECONFIG, the Docker variables, and a PATH on which kubectl, helm, kind and docker are these."""
        folder = self.layout.cluster / "path"
        folder.mkdir(parents=True, exist_ok=True)
        programs = {name: gobuild.binary(self.layout, name) for name in ("kubectl", "helm", "kind")}
        for name, target in {**programs, "docker": self.engine.client}.items():
            link = folder / name
            link.unlink(missing_ok=True)
            link.symlink_to(target)
        path = os.environ.get("PATH", os.defpath).split(os.pathsep)
        ordered = [str(folder), *(one for one in path if one != str(folder))]
        return {"KUBECONFIG": str(self.kubeconfig), **self.engine.env, "PATH": os.pathsep.join(ordered)}


class CurrentCluster(Cluster):
    """The cluster that the caller's kubeconfig points to: nothing is started, hurt or stopped."""

    @property
    def kubeconfig(self) -> Path:
        """The first file of $KUBECONFIG, else ~/.kube/config."""
        listed = [one for one in os.environ.get("KUBECONFIG", "").split(os.pathsep) if one]
        path = Path(listed[0]) if listed else Path.home() / ".kube/config"
        if not path.exists():
            raise ClusterError(f"CLUSTER=current, but there is no kubeconfig {path}: set KUBECONFIG")
        return path

    def up(self) -> None:
        """Check that it answers."""
        gobuild.build(self.layout, (gobuild.PROGRAMS["kubectl"], gobuild.PROGRAMS["helm"]))
        self.kubectl("get", "--raw", "/readyz", timeout=20)

    def down(self, *, purge: bool = False) -> None:
        """It is not ours."""

    def healthy(self) -> bool:
        try:
            return self.kubectl("get", "--raw", "/readyz", timeout=20).strip() == "ok"
        except ClusterError:
            return False

    @property
    def nodes(self) -> Nodes:
        raise ClusterError("CLUSTER=current: nodes of a cluster that is not ours are left alone; unset CLUSTER")

    def load(self, *things: str) -> None:
        """Refused: such a cluster takes its images from a registry."""
        raise ClusterError(
            f"CLUSTER=current takes images from a registry: docker tag and docker push {' '.join(things)} to one that "
            "its nodes can pull from, and give those names to the chart and the resources"
        )

    def environment(self) -> dict[str, str]:
        """KUBECONFIG only."""
        return {"KUBECONFIG": str(self.kubeconfig)}


def open_cluster(name: str = DEFAULT_NAME, mounts: Sequence[Mount] | None = None) -> Cluster:
    """The cluster to use: the caller's own with CLUSTER=current, else the local one."""
    chosen = os.environ.get("CLUSTER", "")
    if chosen not in ("", "local", "current"):
        raise ClusterError(f"CLUSTER={chosen}: write current, or local (the default)")
    return CurrentCluster(name, mounts) if chosen == "current" else Cluster(name, mounts)
