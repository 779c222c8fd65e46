"""The operator, installed from the chart of this checkout."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.cluster import Cluster
from e2e.cluster.gobuild import binary
from e2e.cluster.process import run
from e2e.deployment.errors import DeploymentError
from sglang_rollout.api import CRD_NAME

CHART = Path(__file__).parents[2] / "charts" / "sglang-rollout"
RELEASE = "sglang-rollout"
NAMESPACE = "sglang-rollout-system"
INSTALL_SECONDS = 150


@dataclass(frozen=True)
class Chart:
    """The release in one cluster."""

    cluster: Cluster
    namespace: str = NAMESPACE

    def install(self, images: Mapping[str, str], **values: Any) -> None:
        """Install or upgrade, and wait until both replicas are Ready. images: references by name (operator, agent,
        router); values: more of the chart's."""
        wanted = {"images": {name: images[name] for name in ("operator", "agent", "router")}, **values}
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(wanted, file)
            file.flush()
            words = ["upgrade", "--install", RELEASE, str(CHART), "--create-namespace", f"--values={file.name}"]
            self._helm(*words, "--wait", f"--timeout={INSTALL_SECONDS}s", timeout=INSTALL_SECONDS + 30)

    def uninstall(self) -> None:
        """Remove the release, its namespace, and the CRD that the chart keeps if the release brought it; fleets that
        still exist go with the CRD."""
        brought = self._brought_crd()
        self._helm("uninstall", RELEASE, "--ignore-not-found", "--wait", "--timeout=120s", timeout=150)
        if brought:
            self.cluster.kubectl("delete", "crd", CRD_NAME, "--ignore-not-found", "--timeout=90s", timeout=120)
        self.cluster.kubectl("delete", "namespace", self.namespace, "--ignore-not-found", "--timeout=120s", timeout=150)

    def pods(self) -> list[dict[str, Any]]:
        """The operator's pods that are not on their way out."""
        shown = self.cluster.kubectl("-n", self.namespace, "get", "pods", "-o", "json")
        items: list[dict[str, Any]] = json.loads(shown)["items"]
        return [item for item in items if "deletionTimestamp" not in item["metadata"]]

    def leader(self) -> str:
        """Name of the pod that holds the lease."""
        shown = json.loads(self.cluster.kubectl("-n", self.namespace, "get", "leases", "-o", "json"))
        holders = [item["spec"].get("holderIdentity") or "" for item in shown["items"]]
        for pod in self.pods():
            name: str = pod["metadata"]["name"]
            if any(name in holder for holder in holders):
                return name
        raise DeploymentError(f"no operator pod holds a lease; holders: {', '.join(holders) or 'none'}")

    def _brought_crd(self) -> bool:
        annotations = "{.metadata.annotations.meta\\.helm\\.sh/release-namespace}"
        words = ("get", "crd", CRD_NAME, "--ignore-not-found", "-o", f"jsonpath={annotations}")
        return self.cluster.kubectl(*words).strip() == self.namespace

    def _helm(self, *words: str, timeout: float) -> None:
        helm = binary(self.cluster.layout, "helm")
        options = [f"--kubeconfig={self.cluster.kubeconfig}", f"--namespace={self.namespace}"]
        run([helm, *words, *options], timeout=timeout)
