"""The trainer of these tests: a pod with a ServiceAccount of its own, which drives engines by trainer.py."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.cluster import Cluster
from e2e.cluster.gobuild import binary
from e2e.cluster.process import run
from sglang_rollout.protocol.fleet import audience

ACCOUNT = "trainer"
STRANGER = "stranger"
LABELS = {"app": "trainer"}
SCRIPT = Path(__file__).parent / "trainer.py"
CALL_SECONDS = 120.0


@dataclass(frozen=True)
class TrainerPod:
    """A pod with tokens of one account for one fleet."""

    cluster: Cluster
    namespace: str
    name: str

    async def __call__(self, *words: str) -> tuple[int, list[dict[str, Any]]]:
        """Run trainer.py with these words; its exit code and the calls that it made."""
        argv = [str(binary(self.cluster.layout, "kubectl")), f"--kubeconfig={self.cluster.kubeconfig}"]
        argv += ["-n", self.namespace, "exec", "-i", self.name, "--", "python3", "-", *words]
        script = SCRIPT.read_text()
        done = await asyncio.to_thread(run, argv, timeout=CALL_SECONDS, stdin=script, check=False)
        return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


async def create_trainer(cluster: Cluster, namespace: str, account: str, fleet_uid: str, image: str) -> TrainerPod:
    """Returns when it runs. image: any with Python."""
    metadata = {"name": account, "namespace": namespace, "labels": LABELS}
    token = {"serviceAccountToken": {"audience": audience(fleet_uid), "expirationSeconds": 600, "path": "token"}}
    container = {
        "name": "trainer",
        "image": image,
        "command": ["python3", "-c", "import time; time.sleep(10**6)"],
        "volumeMounts": [{"name": "token", "mountPath": "/var/run/secrets/rollout", "readOnly": True}],
    }
    spec = {
        "serviceAccountName": account,
        "terminationGracePeriodSeconds": 0,
        "containers": [container],
        "volumes": [{"name": "token", "projected": {"sources": [token]}}],
    }
    for manifest in (
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec},
    ):
        await asyncio.to_thread(cluster.kubectl, "apply", "-f", "-", stdin=json.dumps(manifest))
    ready = ("-n", namespace, "wait", "--for=condition=Ready", f"pod/{account}", "--timeout=90s")
    await asyncio.to_thread(cluster.kubectl, *ready, timeout=100)
    return TrainerPod(cluster, namespace, account)
