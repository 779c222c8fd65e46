"""The trainer of these tests: a pod with torch and the client, whose ServiceAccount may patch the resource and nothing
else. It publishes by trainer_process.py."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from e2e.cluster import Cluster
from e2e.deployment.connection import Connection, pod_url
from e2e.deployment.errors import DeploymentError
from e2e.fleet.journal import path_of
from sglang_rollout.api.group import GROUP, PLURAL

NAME = "trainer"
LABELS = {"app": NAME}
PORT = 8000
PROGRAM = Path(__file__).parent / "trainer_process.py"
START_SECONDS = 120.0
POLL_SECONDS = 0.1
SGLANG = "/opt/sglang-cpu"
PACKAGES = "/opt/app/lib/python3.11/site-packages"
"""Of the operator's image: our package and the Kubernetes client."""


@dataclass(frozen=True)
class Told:
    """How a publish ended. state: done, failed or killed; told: the client's result, or error and message."""

    state: str
    told: dict[str, Any]
    seconds: float

    @property
    def message(self) -> str:
        return str(self.told.get("message", ""))


@dataclass(frozen=True)
class Job:
    """One publish that was begun."""

    trainer: Trainer
    id: str

    async def state(self) -> dict[str, Any]:
        return await self.trainer.call("GET", f"/publish/{self.id}")

    async def holding(self, *, timeout: float = 60) -> None:
        """Until it has sent as many tensors as it was told to."""
        await self._until(("holding",), timeout)

    async def ended(self, *, timeout: float = 120) -> Told:
        found = await self._until(("done", "failed", "killed"), timeout)
        return Told(found["state"], found["told"], float(found.get("seconds", 0.0)))

    async def go(self) -> None:
        await self.trainer.call("POST", f"/go/{self.id}")

    async def kill(self) -> None:
        await self.trainer.call("POST", f"/kill/{self.id}")

    async def _until(self, states: tuple[str, ...], timeout: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        while (found := await self.state())["state"] not in states:
            if time.monotonic() > deadline or found["state"] in ("done", "failed", "killed"):
                raise DeploymentError(f"the publish {self.id} is not {' or '.join(states)} but {found}")
            await asyncio.sleep(POLL_SECONDS)
        return found


@dataclass(frozen=True)
class Trainer:
    """The pod, for one fleet."""

    connection: Connection
    namespace: str
    fleet: str
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def begin(
        self,
        version: str,
        model: str = "",
        *,
        call: str = "publish",
        spoil: str = "",
        hold_after: int | None = None,
        **options: Any,
    ) -> Job:
        """Begin to publish the model's tensors as `version`; options: of the client's call."""
        job = Job(self, f"{next(self._numbers)}-{int(time.time())}")
        order = {
            "id": job.id,
            "fleet": self.fleet,
            "version": version,
            "model": path_of(model) if model else "",
            "call": call,
            "options": options,
            "spoil": spoil,
            "hold_after": hold_after,
        }
        await self.call("POST", "/publish", order)
        return job

    async def publish(self, version: str, model: str, *, timeout: float = 120, **words: Any) -> Told:
        """Begin and wait for the end."""
        return await (await self.begin(version, model, **words)).ended(timeout=timeout)

    async def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        url = pod_url(self.namespace, NAME, PORT) + path
        try:
            answer = await self.connection.client.request(method, url, json=body or {}, timeout=20)
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise DeploymentError(f"the trainer: {method} {path}: {type(error).__name__}: {error}") from error
        decoded: dict[str, Any] = answer.json()
        return decoded


async def create_trainer(
    cluster: Cluster, connection: Connection, namespace: str, fleet: str, engine_image: str, operator_image: str
) -> Trainer:
    """Returns when it has loaded torch and answers."""
    for manifest in (*_rights(namespace), _program(namespace), _pod(namespace, engine_image, operator_image)):
        await asyncio.to_thread(cluster.kubectl, "apply", "-f", "-", stdin=json.dumps(manifest))
    ready = ("-n", namespace, "wait", "--for=condition=Ready", f"pod/{NAME}", f"--timeout={START_SECONDS:.0f}s")
    await asyncio.to_thread(cluster.kubectl, *ready, timeout=START_SECONDS + 10)
    return Trainer(connection, namespace, fleet)


def _rights(namespace: str) -> list[dict[str, Any]]:
    metadata = {"name": NAME, "namespace": namespace}
    rule = {"apiGroups": [GROUP], "resources": [PLURAL], "verbs": ["get", "list", "watch", "patch"]}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": NAME}
    subject = {"kind": "ServiceAccount", "name": NAME, "namespace": namespace}
    rbac = "rbac.authorization.k8s.io/v1"
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {"apiVersion": rbac, "kind": "Role", "metadata": metadata, "rules": [rule]},
        {"apiVersion": rbac, "kind": "RoleBinding", "metadata": metadata, "roleRef": role, "subjects": [subject]},
    ]


def _program(namespace: str) -> dict[str, Any]:
    metadata = {"name": NAME, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {PROGRAM.name: PROGRAM.read_text()}}


def _pod(namespace: str, engine_image: str, operator_image: str) -> dict[str, Any]:
    client = {
        "name": "client",
        "image": operator_image,
        "command": ["cp", "-r", f"{PACKAGES}/.", "/client/"],
        "volumeMounts": [{"name": "client", "mountPath": "/client"}],
    }
    container = {
        "name": "trainer",
        "image": engine_image,
        "command": ["python3", f"/program/{PROGRAM.name}"],
        "ports": [{"name": "http", "containerPort": PORT}],
        "readinessProbe": {"httpGet": {"path": "/livez", "port": "http"}, "periodSeconds": 1},
        "resources": {"requests": {"cpu": "50m", "memory": "512Mi"}},
        "volumeMounts": [
            {"name": "client", "mountPath": "/client", "readOnly": True},
            {"name": "program", "mountPath": "/program", "readOnly": True},
            {"name": "sglang", "mountPath": SGLANG, "readOnly": True},
            {"name": "models", "mountPath": "/models", "readOnly": True},
        ],
    }
    spec = {
        "serviceAccountName": NAME,
        "terminationGracePeriodSeconds": 0,
        "initContainers": [client],
        "containers": [container],
        "volumes": [
            {"name": "client", "emptyDir": {}},
            {"name": "program", "configMap": {"name": NAME}},
            {"name": "sglang", "hostPath": {"path": SGLANG, "type": "Directory"}},
            {"name": "models", "hostPath": {"path": "/models", "type": "Directory"}},
        ],
    }
    metadata = {"name": NAME, "namespace": namespace, "labels": LABELS}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
