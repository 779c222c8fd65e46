"""A router that somebody else runs: smg in a Deployment of its own, with a key for its worker API."""

from __future__ import annotations

import json
from typing import Any

from e2e.cluster import Cluster

NAME = "their-router"
KEY = "a-key-that-only-tests-know"
PORT = 30000
FLEETS = "e2e-external-router"
"""The namespace of the fleets that may use the key."""
CREDENTIAL = {"namespace": FLEETS, "name": "their-router", "secretName": "their-router", "key": "key"}
"""An entry of the chart's routerCredentials; spec.router.external.credential names it."""


def create_credential(cluster: Cluster, namespace: str) -> None:
    """The Secret that the chart mounts into the operator; it must be there first."""
    _apply(cluster, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    metadata = {"name": CREDENTIAL["secretName"], "namespace": namespace}
    _apply(
        cluster,
        {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {CREDENTIAL["key"]: KEY}},
    )


def create_router(cluster: Cluster, namespace: str, image: str) -> None:
    """Deployment and Service; workers are registered by whoever has the key."""
    labels = {"app": NAME}
    command = [
        "smg", "launch", "--host=0.0.0.0", f"--port={PORT}", "--policy=round_robin",
        "--health-check-endpoint=/health", "--health-check-interval-secs=5",
        f"--control-plane-api-keys=operator:operator:admin:{KEY}", "--disable-retries", "--disable-circuit-breaker",
        "--disable-tokenizer-autoload", "--history-backend=none", "--disable-worker-overload-protection",
    ]  # fmt: skip
    container: dict[str, Any] = {
        "name": "router",
        "image": image,
        "command": command,
        "ports": [{"name": "http", "containerPort": PORT}],
        "readinessProbe": {"httpGet": {"path": "/liveness", "port": "http"}, "periodSeconds": 1},
    }
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    spec = {"replicas": 1, "selector": {"matchLabels": labels}, "template": template}
    metadata = {"name": NAME, "namespace": namespace}
    _apply(cluster, {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec})
    ports = [{"port": PORT, "targetPort": "http"}]
    service = {"selector": labels, "ports": ports}
    _apply(cluster, {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service})
    cluster.kubectl("-n", namespace, "rollout", "status", f"deployment/{NAME}", "--timeout=120s", timeout=130)


def _apply(cluster: Cluster, manifest: dict[str, Any]) -> None:
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))
