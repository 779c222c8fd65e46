"""Checks that a cluster does what the fleet needs of a Kubernetes. Each is timed and has a deadline."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import gobuild, versions
from e2e.cluster.cluster import Cluster, CurrentCluster
from e2e.cluster.errors import ClusterError
from e2e.cluster.node_image import PROBE
from e2e.cluster.process import wait_for

_NAMESPACE = "cluster-verify"
_PODS = ("probe-0", "probe-1", "probe-2")
_MANIFEST = Path(__file__).with_name("probe.yaml")


class CheckFailed(Exception):
    """The cluster answered, but not as it must."""


def _expect(truth: bool, otherwise: str) -> None:
    if not truth:
        raise CheckFailed(otherwise)


@dataclass(frozen=True)
class Checks:
    """The checks, against one cluster, in a namespace that is removed afterwards."""

    cluster: Cluster

    @property
    def image(self) -> str:
        """A cluster of the caller's takes it from a registry."""
        return versions.PROBE_IMAGE if isinstance(self.cluster, CurrentCluster) else PROBE

    def kubectl(self, *args: str, timeout: float = 30, stdin: str | None = None) -> str:
        return self.cluster.kubectl("-n", _NAMESPACE, *args, timeout=timeout, stdin=stdin)

    def execute(self, pod: str, *command: str) -> str:
        """Run a command in a pod. busybox' own wget -T ends in SIGSEGV, so `timeout` bounds it."""
        return self.kubectl("exec", pod, "--", "timeout", "5", *command, timeout=30).strip()

    def addresses(self) -> dict[str, str]:
        pods = json.loads(self.kubectl("get", "pods", "-l", "app=probe", "-o", "json"))["items"]
        return {pod["metadata"]["name"]: pod["status"].get("podIP", "") for pod in pods}

    def node_of(self, pod: str) -> str:
        return self.kubectl("get", "pod", pod, "-o", "jsonpath={.spec.nodeName}")

    def nodes_ready(self) -> None:
        wait_for("all nodes Ready", self.cluster.healthy, timeout=120)

    def image_load(self) -> None:
        self.cluster.load(PROBE)

    def stateful_set(self) -> None:
        self.kubectl("apply", "-f", "-", stdin=_MANIFEST.read_text().replace(PROBE, self.image))
        self.kubectl("rollout", "status", "statefulset/probe", "--timeout=120s", timeout=130)

    def both_workers(self) -> None:
        nodes = {self.node_of(pod) for pod in _PODS}
        _expect(len(nodes) == 2, f"all pods are on {nodes}")

    def names(self) -> None:
        """Each pod resolves each pod's own name to its address; a new name may take CoreDNS a few seconds."""
        wanted = self.addresses()

        def resolved() -> bool:
            for asking in _PODS:
                for name in _PODS:
                    full = f"{name}.probe.{_NAMESPACE}.svc.cluster.local"
                    try:
                        if wanted[name] not in self.execute(asking, "nslookup", full):
                            return False
                    except ClusterError:
                        return False
            return True

        wait_for("every pod's name in every pod", resolved, timeout=60)

    def http_across_nodes(self) -> None:
        for asking in _PODS:
            for name in _PODS:
                answer = self.execute(asking, "wget", "-q", "-O", "-", f"http://{name}.probe:8080/")
                _expect(answer == name, f"{asking} asked {name} and heard {answer!r}")

    def service_balances(self) -> None:
        loop = "for i in $(seq 20); do wget -q -O - http://probe-address/; done | sort -u"
        seen = self.execute("probe-0", "sh", "-c", loop).split()
        _expect(len(seen) > 1, f"20 requests to the Service all went to {seen}")

    def api_from_pod(self) -> None:
        url = "https://kubernetes.default/version"
        answer = self.execute("probe-0", "wget", "-q", "--no-check-certificate", "-O", "-", url)
        _expect('"gitVersion"' in answer, f"{url} answered {answer!r}")

    def logs_and_exec(self) -> None:
        _expect("serving" in self.kubectl("logs", "probe-2"), "probe-2's log is not what it wrote")
        _expect(self.execute("probe-2", "hostname") == "probe-2", "exec ran elsewhere")

    def port_forward(self) -> None:
        with self._forwarded("probe-0", 8080) as url, urllib.request.urlopen(url, timeout=10) as answer:
            body = answer.read().decode().strip()
        _expect(body == "probe-0", f"port-forward answered {body!r}")

    @contextlib.contextmanager
    def _forwarded(self, pod: str, port: int) -> Iterator[str]:
        argv = [str(gobuild.binary(self.cluster.layout, "kubectl")), f"--kubeconfig={self.cluster.kubeconfig}"]
        argv += ["-n", _NAMESPACE, "port-forward", f"pod/{pod}", f":{port}"]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as forward:
            try:
                assert forward.stdout is not None
                line = forward.stdout.readline()  # kubectl prints it, or ends
                match = re.search(r"127\.0\.0\.1:\d+", line)
                _expect(match is not None, f"kubectl port-forward said {line!r}")
                assert match is not None
                yield f"http://{match[0]}/"
            finally:
                forward.kill()

    def memory_limit(self) -> None:
        container = {
            "name": "greedy",
            "image": self.image,
            "imagePullPolicy": "IfNotPresent",
            "command": ["sh", "-c", "tail -c 200m /dev/zero > /dev/null"],
            "resources": {"limits": {"memory": "50Mi"}},
        }
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "greedy"},
            "spec": {"restartPolicy": "Never", "containers": [container]},
        }
        self.kubectl("apply", "-f", "-", stdin=json.dumps(pod))
        path = "jsonpath={.status.containerStatuses[0].state.terminated.reason}"

        def killed() -> bool:
            return self.kubectl("get", "pod", "greedy", "-o", path) == "OOMKilled"

        wait_for("the pod over its memory limit to be OOMKilled", killed, timeout=60)

    def same_volume_again(self) -> None:
        claim = ("get", "pvc", "data-probe-2", "-o", "jsonpath={.spec.volumeName}")
        before = self.kubectl(*claim)
        self.kubectl("delete", "pod", "probe-2", "--timeout=60s", timeout=70)
        self.kubectl("rollout", "status", "statefulset/probe", "--timeout=90s", timeout=100)
        _expect(self.kubectl(*claim) == before, "the pod that came back has another volume")

    def node_switched_off(self) -> None:
        self._fault_and_back("stop", "start")

    def node_frozen(self) -> None:
        self._fault_and_back("pause", "unpause")

    def node_cut_off(self) -> None:
        self._fault_and_back("cut", "heal")

    def _fault_and_back(self, fault: str, cure: str) -> None:
        """The node of probe-1 becomes NotReady (after the default 40-50 s), comes back, and serves again."""
        node = self.node_of("probe-1")
        ready = ("get", "node", node, "-o", 'jsonpath={.status.conditions[?(@.type=="Ready")].status}')
        self.cluster.nodes.inflict(fault, node)
        try:
            wait_for(f"{node} to be NotReady", lambda: self.kubectl(*ready) != "True", timeout=120, every=1)
        finally:
            self.cluster.nodes.inflict(cure, node)
        wait_for(f"{node} to be Ready", lambda: self.kubectl(*ready) == "True", timeout=120, every=1)
        self.kubectl("rollout", "status", "statefulset/probe", "--timeout=120s", timeout=130)
        self.names()
        self.http_across_nodes()


def _plan(checks: Checks) -> list[tuple[str, Callable[[], None]]]:
    kubernetes: list[tuple[str, Callable[[], None]]] = [
        ("StatefulSet with volumes becomes ready", checks.stateful_set),
        ("its pods are on both workers", checks.both_workers),
        ("each pod resolves each pod's name", checks.names),
        ("HTTP by name across nodes", checks.http_across_nodes),
        ("a Service balances", checks.service_balances),
        ("the API server through its Service", checks.api_from_pod),
        ("logs and exec", checks.logs_and_exec),
        ("port-forward", checks.port_forward),
        ("memory limits are enforced", checks.memory_limit),
        ("a deleted pod returns with its volume", checks.same_volume_again),
    ]
    if isinstance(checks.cluster, CurrentCluster):
        return kubernetes
    return [
        ("all nodes Ready", checks.nodes_ready),
        ("an image is loaded into all nodes", checks.image_load),
        *kubernetes,
        ("a node is switched off, and on again", checks.node_switched_off),
        ("a node freezes, and goes on", checks.node_frozen),
        ("a node is cut off, and heals", checks.node_cut_off),
    ]


def verify(cluster: Cluster) -> bool:
    """Run all checks, print a line for each, and tell whether all passed."""
    checks = Checks(cluster)
    failed = 0
    plan = _plan(checks)

    def remove_namespace() -> None:
        cluster.kubectl("delete", "namespace", _NAMESPACE, "--ignore-not-found", "--timeout=90s", timeout=100)

    remove_namespace()
    cluster.kubectl("create", "namespace", _NAMESPACE)
    try:
        for title, check in plan:
            begin = time.monotonic()
            try:
                check()
                verdict = "ok"
            except (CheckFailed, ClusterError, OSError) as error:
                verdict, failed = f"FAILED: {error}", failed + 1
            print(f"{time.monotonic() - begin:6.1f} s  {title}: {verdict}", flush=True)
    finally:
        remove_namespace()
    print(f"{len(plan) - failed} passed, {failed} failed")
    return failed == 0
