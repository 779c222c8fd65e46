"""One SGLangRollout on a cluster: patch it, read it, wait for it, and see what belongs to it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from e2e.deployment.connection import Connection, NotFound, Object, core_path, rollouts_path
from e2e.deployment.errors import DeploymentError
from sglang_rollout.api import ConditionType, EngineStatus, SGLangRollout
from sglang_rollout.api.conditions import Condition, find_condition
from sglang_rollout.api.names import (
    COMPONENT_ENGINE,
    COMPONENT_ROUTER,
    LABEL_COMPONENT,
    LABEL_FLEET,
    engine_pod_name,
)

POLL_SECONDS = 0.25

# Everything that a fleet's children can be, as paths below a namespace.
CHILD_KINDS = {
    "StatefulSet": "/apis/apps/v1/namespaces/{}/statefulsets",
    "Deployment": "/apis/apps/v1/namespaces/{}/deployments",
    "Pod": "/api/v1/namespaces/{}/pods",
    "Service": "/api/v1/namespaces/{}/services",
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
    "PodDisruptionBudget": "/apis/policy/v1/namespaces/{}/poddisruptionbudgets",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
}


@dataclass(frozen=True)
class Fleet:
    """The resource `name` in `namespace`."""

    connection: Connection
    namespace: str
    name: str

    @property
    def path(self) -> str:
        return rollouts_path(self.namespace, self.name)

    async def create(self, manifest: Object) -> None:
        await self.connection.create(rollouts_path(self.namespace), manifest)

    async def object(self) -> Object:
        """The resource as the API server has it."""
        return await self.connection.get(self.path)

    async def read(self) -> SGLangRollout:
        return SGLangRollout.from_object(await self.object())

    async def patch(self, **spec: Any) -> int:
        """Merge into spec, field names as in YAML; returns the new generation."""
        changed = await self.connection.merge(self.path, {"spec": spec})
        generation: int = changed["metadata"]["generation"]
        return generation

    async def move_weights(self, version: str, path: str, **weights: Any) -> int:
        """Ask for other weights from disk."""
        source = {"type": "Disk", "disk": {"path": path}, "distributed": None, "colocated": None}
        return await self.patch(weights={"version": version, "source": source, **weights})

    async def delete(self) -> None:
        await self.connection.delete(self.path)

    # --- waiting ---------------------------------------------------------------------------------------------------

    async def until(self, what: str, holds: Callable[[SGLangRollout], bool], *, timeout: float) -> SGLangRollout:
        """Read until `holds`; raises DeploymentError with the conditions when `timeout` seconds are over."""
        deadline = time.monotonic() + timeout
        while True:
            rollout = await self.read()
            if holds(rollout):
                return rollout
            if time.monotonic() > deadline:
                raise DeploymentError(f"waited {timeout:.0f} s for {what} of {self.name}\n{describe(rollout)}")
            await asyncio.sleep(POLL_SECONDS)

    async def until_ready(self, *, timeout: float = 300) -> SGLangRollout:
        """Until Ready is True for the generation that is there now or a newer one."""
        asked = (await self.read()).metadata.generation
        return await self.until("Ready", lambda one: is_ready(one, asked), timeout=timeout)

    async def until_serving(self, version: str, *, timeout: float = 300) -> SGLangRollout:
        """Until the whole fleet is Ready at this version."""

        def serving(one: SGLangRollout) -> bool:
            weights = one.status.weights
            return weights is not None and weights.version == version and is_ready(one, one.metadata.generation)

        return await self.until(f"version {version}", serving, timeout=timeout)

    async def until_condition(self, type_: ConditionType, status: bool, *words: str, timeout: float = 60) -> Condition:
        """Until this condition has this status, for the present generation, and every one of `words` is in its
        message; returns it."""
        asked = (await self.read()).metadata.generation

        def holds(one: SGLangRollout) -> bool:
            found = find_condition(one.status.conditions, type_)
            return (
                found is not None
                and found.status == str(status)
                and found.observed_generation >= asked
                and all(word in found.message for word in words)
            )

        title = f"condition {type_}={status}" + (f" with the words {', '.join(words)}" if words else "")
        rollout = await self.until(title, holds, timeout=timeout)
        found = find_condition(rollout.status.conditions, type_)
        assert found is not None
        return found

    async def until_gone(self, *, timeout: float = 120) -> None:
        """Until the resource and everything that belonged to it is gone."""
        deadline = time.monotonic() + timeout
        while left := await self.remains():
            if time.monotonic() > deadline:
                raise DeploymentError(f"waited {timeout:.0f} s for the end of {self.name}; left: {', '.join(left)}")
            await asyncio.sleep(POLL_SECONDS)

    async def remains(self) -> list[str]:
        """The resource and its children that are still there, as Kind/name."""
        try:
            await self.object()
            found = [f"SGLangRollout/{self.name}"]
        except NotFound:
            found = []
        children = await self.children()
        return found + [f"{kind}/{one['metadata']['name']}" for kind, items in children.items() for one in items]

    # --- what belongs to it ----------------------------------------------------------------------------------------

    async def children(self) -> dict[str, list[Object]]:
        """By kind, all objects with the fleet's label."""
        paths = {kind: path.format(self.namespace) for kind, path in CHILD_KINDS.items()}
        lists = await asyncio.gather(
            *(self.connection.items(path, f"{LABEL_FLEET}={self.name}") for path in paths.values())
        )
        return dict(zip(paths, lists, strict=True))

    async def engine_pods(self) -> list[Object]:
        return await self._pods(COMPONENT_ENGINE)

    async def router_pods(self) -> list[Object]:
        return await self._pods(COMPONENT_ROUTER)

    async def _pods(self, component: str) -> list[Object]:
        selector = f"{LABEL_FLEET}={self.name},{LABEL_COMPONENT}={component}"
        return await self.connection.items(core_path(self.namespace, "pods"), selector)

    async def pod(self, index: int, rank: int = 0) -> Object:
        return await self.connection.get(core_path(self.namespace, "pods", engine_pod_name(self.name, index, rank)))

    async def delete_pod(self, pod: str, *, grace_seconds: int | None = None) -> None:
        await self.connection.delete(core_path(self.namespace, "pods", pod), grace_seconds=grace_seconds)

    async def engine(self, index: int) -> EngineStatus:
        """The engine's entry in status. Raises DeploymentError when it has none yet."""
        wanted = f"{self.name}-e{index}"
        for entry in (await self.read()).status.engines:
            if entry.name == wanted:
                return entry
        raise DeploymentError(f"status.engines has no {wanted}")


def is_ready(rollout: SGLangRollout, generation: int) -> bool:
    found = find_condition(rollout.status.conditions, ConditionType.READY)
    return found is not None and found.status == "True" and found.observed_generation >= generation


def describe(rollout: SGLangRollout) -> str:
    """Conditions and engines in a few lines."""
    status = rollout.status
    lines = [f"  generation {rollout.metadata.generation}, observed {status.observed_generation}"]
    lines += [f"  {one.type}={one.status} {one.reason}: {one.message}" for one in status.conditions]
    if status.weights is not None:
        transaction = status.weights.transaction
        move = "none" if transaction is None else json.dumps(transaction.to_object())
        versions = f"{status.weights.version} -> {status.weights.target_version}"
        lines.append(f"  weights {versions}, {status.weights.phase}: {move}")
    lines += [
        f"  {one.name}: version {one.weight_version or '?'}, incarnation {one.incarnation}, "
        f"{'ready' if one.ready else 'not ready'}, {'routable' if one.routable else 'not routable'} {one.message}"
        for one in status.engines
    ]
    return "\n".join(lines)
