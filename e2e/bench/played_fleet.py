"""A resource on a bare API server whose pods are played: the objects are there, the programs are fakes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from e2e.bench.fake_pods import FakeAgent, FakeSidecar
from e2e.bench.operator_program import FLEET_NAMESPACE
from e2e.bench.pod_server import PodServer
from e2e.cluster.errors import ClusterError
from sglang_rollout.api import names
from sglang_rollout.controller.kinds import CONFIG_MAP, DEPLOYMENT, POD, ROLLOUT, STATEFUL_SET, Kind, Object
from sglang_rollout.controller.kube import KubeClient
from sglang_rollout.controller.kube_errors import KubeError, NotFound
from sglang_rollout.protocol.fleet import FleetConfig
from sglang_rollout.protocol.pod import FLEET_FILE
from sglang_rollout.protocol.wire import loads

KUBELET = "bench-kubelet"
FIRST_VERSION = "v0"


def resource(name: str, replicas: int) -> Object:
    """A small valid resource."""
    return {
        "apiVersion": ROLLOUT.api_version,
        "kind": ROLLOUT.kind,
        "metadata": {"name": name, "namespace": FLEET_NAMESPACE},
        "spec": {
            "replicas": replicas,
            "model": {"path": "/models/v0"},
            "engine": {"image": "sglang:1"},
            "weights": {"version": FIRST_VERSION},
        },
    }


def is_ready(value: Object, generation: int) -> bool:
    """Whether Ready is True for this generation."""
    for condition in (value.get("status") or {}).get("conditions") or []:
        if condition["type"] == "Ready":
            return bool(condition["status"] == "True" and condition.get("observedGeneration", 0) >= generation)
    return False


def address(number: int) -> str:
    """A loopback address of its own for each pod."""
    return f"127.1.{number // 250}.{number % 250 + 1}"


@dataclass
class PlayedFleet:
    """seen: the newest version of the resource, by watch. agents: by engine index. server: of all its pods."""

    kube: KubeClient
    name: str
    seen: Object
    agents: list[FakeAgent]
    sidecar: FakeSidecar
    server: PodServer
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def patch(self, **spec: Any) -> int:
        """Merges into spec; returns the new generation."""
        answer = await self.kube.merge(ROLLOUT, FLEET_NAMESPACE, self.name, {"spec": spec})
        return int(answer["metadata"]["generation"])

    async def until(self, holds: Callable[[], bool], what: str, seconds: float = 60.0) -> float:
        """When it held, in monotonic seconds: looked at after every change of an agent and of the resource."""
        try:
            async with asyncio.timeout(seconds):
                while not holds():
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            said = {one["type"]: one["message"] for one in (self.seen.get("status") or {}).get("conditions") or []}
            raise ClusterError(f"waited {seconds:.0f} s for {what}: {said}") from None
        return time.monotonic()

    async def until_ready(self, generation: int, seconds: float = 60.0) -> float:
        return await self.until(lambda: is_ready(self.seen, generation), f"Ready at {generation}", seconds)


@asynccontextmanager
async def played_fleet(kube: KubeClient, name: str, replicas: int) -> AsyncIterator[PlayedFleet]:
    """Ready when the block begins."""
    created = await kube.create(ROLLOUT, resource(name, replicas))
    shared = await _exists(kube, CONFIG_MAP, names.fleet_config_name(name))
    config = loads(FleetConfig, shared["data"][FLEET_FILE])
    agents = [
        FakeAgent.serving(await _engine_pod(kube, name, index), address(index), config.boot)
        for index in range(replicas)
    ]
    sidecar = FakeSidecar.idle(await _router_pod(kube, name), address(replicas))
    server = PodServer(config.trust)
    fleet = PlayedFleet(kube, name, created, agents, sidecar, server)
    await server.start([*agents, sidecar])
    for index, agent in enumerate(agents):
        agent.on_change = fleet.changed.set
        await _running(kube, names.engine_pod_name(name, index, 0), agent.address)
    await _running(kube, f"{names.router_name(name)}-x", sidecar.address)
    watching = asyncio.create_task(_watch(fleet))
    try:
        await fleet.until_ready(1, 120 + 0.5 * replicas)
        yield fleet
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await server.stop()
        with suppress(KubeError):
            await kube.delete(ROLLOUT, FLEET_NAMESPACE, name, created["metadata"]["uid"])


async def _watch(fleet: PlayedFleet) -> None:
    fields = f"metadata.name={fleet.name}"
    since = fleet.seen["metadata"]["resourceVersion"]
    while True:
        async for kind, value in fleet.kube.watch(ROLLOUT, FLEET_NAMESPACE, since, fields=fields, seconds=600):
            since = value["metadata"]["resourceVersion"]
            if kind in ("ADDED", "MODIFIED"):
                fleet.seen = value
                fleet.changed.set()


async def _engine_pod(kube: KubeClient, fleet: str, index: int) -> str:
    """Rank 0 of an engine as its StatefulSet would make it; returns its UID."""
    owner = await _exists(kube, STATEFUL_SET, names.engine_name(fleet, index))
    labels = {**names.engine_labels(fleet, index), names.LABEL_RANK: "0"}
    return await _pod(kube, names.engine_pod_name(fleet, index, 0), labels, owner)


async def _router_pod(kube: KubeClient, fleet: str) -> str:
    owner = await _exists(kube, DEPLOYMENT, names.router_name(fleet))
    return await _pod(kube, f"{names.router_name(fleet)}-x", names.router_labels(fleet), owner)


async def _pod(kube: KubeClient, name: str, labels: dict[str, str], owner: Object) -> str:
    annotations = owner["spec"]["template"]["metadata"].get("annotations") or {}
    metadata = {"name": name, "namespace": FLEET_NAMESPACE, "labels": labels, "annotations": annotations}
    spec = {"containers": [{"name": "main", "image": "none"}]}
    created = await kube.create(POD, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    return str(created["metadata"]["uid"])


async def _running(kube: KubeClient, name: str, ip: str) -> None:
    """What a kubelet would say of a pod whose containers are all ready."""
    status = {
        "phase": "Running",
        "podIP": ip,
        "podIPs": [{"ip": ip}],
        "conditions": [{"type": "Ready", "status": "True"}],
    }
    metadata = {"name": name, "namespace": FLEET_NAMESPACE}
    await kube.apply(
        POD, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": status}, KUBELET, "status"
    )


async def _exists(kube: KubeClient, kind: Kind, name: str, seconds: float = 120.0) -> Object:
    """The object, as soon as it is there."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return await kube.get(kind, FLEET_NAMESPACE, name)
        except NotFound:
            if time.monotonic() > deadline:
                raise ClusterError(f"the operator has not made {kind.kind} {name} in {seconds:.0f} s") from None
            await asyncio.sleep(0.05)
