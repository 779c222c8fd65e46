"""Whole operator processes against a real API server, with pods that are played by the tests."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

from kubernetes.aio.client import Configuration
from kubernetes.aio.config import load_kube_config

from e2e.cluster.apiserver import ApiServer
from sglang_rollout.api import names
from sglang_rollout.controller.kinds import POD, ROLLOUT, STATEFUL_SET, Kind, Object
from sglang_rollout.controller.kube import KubeClient
from sglang_rollout.controller.kube_errors import Conflict, NotFound
from sglang_rollout.controller.process import OperatorProcess
from sglang_rollout.controller.settings import Settings
from sglang_rollout.protocol.fleet import Trust
from sglang_rollout.protocol.pod import AGENT_PORT
from sglang_rollout.serving.trust import verify
from sglang_rollout.transitions.observed import Observed
from sglang_rollout.transitions.plan import plan
from sglang_rollout.transitions.planned import Plan
from tests.controller.fake_kube import eventually
from tests.controller.fake_pod import FakePod

_LEASES = itertools.count(1)
_ADDRESSES = itertools.count(2)

Planner = Callable[[Observed, datetime], Plan]


async def configuration(server: ApiServer) -> Configuration:
    loaded = Configuration()
    await load_kube_config(config_file=str(server.kubeconfig), client_configuration=loaded)  # type: ignore[no-untyped-call]
    loaded.connection_pool_maxsize = 0
    return loaded


@asynccontextmanager
async def client(server: ApiServer) -> AsyncIterator[KubeClient]:
    kube = KubeClient(await configuration(server))
    try:
        yield kube
    finally:
        await kube.close()


@asynccontextmanager
async def operator_program(server: ApiServer, lease: str, pod_name: str) -> AsyncIterator[Process]:
    """As a program of its own, as it runs in its container."""
    program = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "sglang_rollout.controller",
        stdin=DEVNULL,
        stderr=PIPE,
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join(sys.path),
            "KUBECONFIG": str(server.kubeconfig),
            "OPERATOR_NAMESPACE": "ops",
            "POD_NAME": pod_name,
            "OPERATOR_SERVICE_ACCOUNT": "operator",
            "WATCH_NAMESPACES": "ns",
            "AGENT_IMAGE": "agent:1",
            "ROUTER_IMAGE": "router:1",
            "METRICS_PORT": "0",
            "LEASE_NAME": lease,
        },
    )
    drain = asyncio.create_task(program.communicate())
    try:
        yield program
    finally:
        if program.returncode is None:
            program.kill()
        await drain


@dataclass
class Running:
    process: OperatorProcess
    task: asyncio.Task[int]

    async def stop(self) -> int:
        self.process.stop.set()
        return await asyncio.wait_for(self.task, 20)

    async def leads(self) -> None:
        await eventually(lambda: self.process.lease.leading or self.task.done(), 30)
        assert not self.task.done(), "the operator has ended"


def new_lease() -> str:
    """A name of its own for each test: they share the API server."""
    return f"lease-{next(_LEASES)}"


@asynccontextmanager
async def operator(
    server: ApiServer, lease: str, planner: Planner = plan, pod_name: str = "operator-0"
) -> AsyncIterator[Running]:
    """In this event loop, watching the namespace ns. Only one at a time: kopf cancels, when it stops, every task that
    was made after it started."""
    settings = Settings(
        namespace="ops",
        pod_name=pod_name,
        service_account="operator",
        agent_image="agent:1",
        router_image="router:1",
        watch_namespaces=("ns",),
        metrics_port=0,
        lease_name=lease,
        workers=4,
    )
    process = OperatorProcess(settings, await configuration(server), planner=planner)
    running = Running(process, asyncio.create_task(process.run()))
    try:
        yield running
    finally:
        if not running.task.done():
            await running.stop()


async def until(condition: Callable[[], Awaitable[object]], seconds: float = 20.0) -> None:
    """Returns when what the condition reads holds; fails the test when it does not in time."""
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110 what it waits for has no event
            await asyncio.sleep(0.02)


async def exists(kube: KubeClient, kind: Kind, name: str, namespace: str = "ns", seconds: float = 20.0) -> Object:
    """The object, as soon as it is there."""
    async with asyncio.timeout(seconds):
        while True:
            try:
                return await kube.get(kind, namespace, name)
            except NotFound:
                await asyncio.sleep(0.02)


@dataclass
class Fleet:
    """A resource, and the pods that the tests play for it; they check the operator's tokens as agents do."""

    kube: KubeClient
    name: str
    pods: list[FakePod] = field(default_factory=list)

    async def create(self, **spec: Any) -> Object:
        return await self.kube.create(
            ROLLOUT,
            {
                "apiVersion": ROLLOUT.api_version,
                "kind": ROLLOUT.kind,
                "metadata": {"name": self.name, "namespace": "ns"},
                "spec": {"model": {"path": "/models/m"}, "engine": {"image": "sglang:1"}, **spec},
            },
        )

    async def get(self) -> Object:
        return await self.kube.get(ROLLOUT, "ns", self.name)

    async def patch(self, **spec: Any) -> Object:
        return await self.kube.merge(ROLLOUT, "ns", self.name, {"spec": spec})

    async def add_pod(self, index: int, trust: Trust | None = None) -> FakePod:
        """Rank 0 of an engine as its StatefulSet would make it, with an agent that answers."""
        pod_name = names.engine_pod_name(self.name, index, 0)
        stateful_set = await exists(self.kube, STATEFUL_SET, names.engine_name(self.name, index))
        created = await self.kube.create(
            POD,
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": pod_name,
                    "namespace": "ns",
                    "annotations": stateful_set["spec"]["template"]["metadata"]["annotations"],
                    "labels": {**names.engine_labels(self.name, index), names.LABEL_RANK: "0"},
                },
                "spec": {"containers": [{"name": "engine", "image": "sglang:1"}]},
            },
        )
        address = f"127.0.1.{next(_ADDRESSES)}"
        pod = FakePod(created["metadata"]["uid"])
        if trust is not None:
            pod.check_token = partial(_verify, trust)
        await pod.start(address, AGENT_PORT)
        self.pods.append(pod)
        status = {"podIP": address, "podIPs": [{"ip": address}], "phase": "Running"}
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": pod_name, "namespace": "ns"}, "status": status}
        await self.kube.apply(POD, body, "test-kubelet", "status")
        return pod

    async def close(self) -> None:
        for pod in self.pods:
            await pod.stop()
        try:
            found = await self.get()
            await self.kube.delete(ROLLOUT, "ns", self.name, found["metadata"]["uid"])
        except (NotFound, Conflict):
            pass


def _verify(trust: Trust, token: str) -> None:
    verify(token, trust)


@asynccontextmanager
async def fleet(server: ApiServer, name: str) -> AsyncIterator[Fleet]:
    async with client(server) as kube:
        made = Fleet(kube, name)
        try:
            yield made
        finally:
            await made.close()
