"""Renders the chart with the real Helm."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import yaml

from e2e.cluster import gobuild
from e2e.cluster.layout import Layout
from e2e.cluster.versions import KUBERNETES

CHART = Path(__file__).parents[2] / "charts" / "sglang-rollout"
NAMESPACE = "sglang-rollout-system"
RELEASE = "sglang-rollout"

Object = dict[str, Any]


def helm(*arguments: str, kubeconfig: Path | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
    """With a home of its own: the user's plugins and repositories play no part."""
    layout = Layout.default()
    gobuild.build(layout, [gobuild.PROGRAMS["helm"]])
    with tempfile.TemporaryDirectory(prefix="sglang-rollout-helm-") as home:
        environment = {"PATH": os.environ["PATH"], "HOME": home, "HELM_NAMESPACE": NAMESPACE}
        if kubeconfig is not None:
            environment["KUBECONFIG"] = str(kubeconfig)
        command = [str(gobuild.binary(layout, "helm")), *arguments]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert not check or result.returncode == 0, result.stderr
    return result


def values_arguments(values: Object) -> list[str]:
    """`values` for Helm's command line, top level by top level."""
    return [word for name, value in values.items() for word in ("--set-json", f"{name}={json.dumps(value)}")]


def template(values: Object | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
    # Helm from source believes in a Kubernetes of long ago until it sees a cluster.
    version = ("--kube-version", KUBERNETES)
    return helm("template", RELEASE, str(CHART), *version, *values_arguments(values or {}), check=check)


def render(values: Object | None = None) -> list[Object]:
    return [one for one in yaml.safe_load_all(template(values).stdout) if one is not None]


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    return [one for one in objects if one["kind"] == kind]


def one_of_kind(objects: list[Object], kind: str) -> Object:
    (found,) = of_kind(objects, kind)
    return found


def pod_template(objects: list[Object]) -> Object:
    found: Object = one_of_kind(objects, "Deployment")["spec"]["template"]
    return found


# Every optional part at once.
EVERYTHING: Object = {
    "replicas": 3,
    "images": {"registry": "registry.example/team", "tag": "1.2", "pullSecrets": [{"name": "pull"}]},
    "trainerAccounts": ["system:serviceaccount:rl:trainer"],
    "routerCredentials": [{"namespace": "rl", "name": "edge", "secretName": "edge-router", "key": "token"}],
    "serviceAccount": {"annotations": {"example.org/role": "operator"}},
    "priorityClassName": "high",
    "nodeSelector": {"pool": "control"},
    "tolerations": [{"key": "control", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "podAnnotations": {"a": "b"},
    "podLabels": {"team": "rl"},
    "metrics": {"serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}},
    "networkPolicy": {"enabled": True, "metricsFrom": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]},
}
NAMESPACED: Object = {"watchNamespaces": ["team-a", "team-b"], "rbac": {"aggregate": False}, "crds": {"install": False}}
VARIANTS: dict[str, Object] = {"default": {}, "everything": EVERYTHING, "namespaced": NAMESPACED}
