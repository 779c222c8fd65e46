"""The main job: a fleet that generates, pauses, moves to new weights, loses a pod, grows and goes.

Every step changes the resource by the kubectl command that it shows, and checks what clients see at the router.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.cluster import Cluster
from e2e.demo.screen import Screen, Step
from e2e.deployment import answers, examples
from e2e.deployment.answers import Answer
from e2e.deployment.connection import Connection
from e2e.deployment.errors import DeploymentError
from e2e.deployment.fleet import Fleet
from e2e.deployment.router_client import Request, RouterClient
from e2e.deployment.traffic import traffic
from sglang_rollout.api import ConditionType, SGLangRollout
from sglang_rollout.api.names import engine_pod_name

START_SECONDS = 900.0
PAUSED_FOR = 4.0
RUNNING, ARRIVING = 6, 4
LONG_TOKENS = 400


@dataclass
class Story:
    """The steps, in the order that they are told."""

    screen: Screen
    cluster: Cluster
    connection: Connection
    namespace: str
    resource: Path
    new_version: str
    new_path: str

    def __post_init__(self) -> None:
        manifest = examples.load(self.resource)
        self.fleet = Fleet(self.connection, self.namespace, manifest["metadata"]["name"])
        self.router = RouterClient.of_fleet(self.connection, self.namespace, self.fleet.name)
        self.replicas: int = manifest["spec"].get("replicas", 1)
        self.first_text = ""

    async def tell(self) -> None:
        for title, chapter in (
            (f"apply {self.fleet.name}: {self.replicas} engines and a router", self.start),
            ("generate through the router", self.generate),
            ("pause, under load", self.pause_and_continue),
            (f"move to weights {self.new_version} from disk, under load", self.move_weights),
            ("delete a pod, under load", self.lose_a_pod),
            (f"scale {self.replicas} -> {self.replicas + 1}", self.scale),
            ("kubectl get sgr", self.table),
            (f"delete {self.fleet.name}", self.end),
        ):
            with self.screen.step(title) as step:
                await chapter(step)

    # --- the chapters ----------------------------------------------------------------------------------------------

    async def start(self, step: Step) -> None:
        step.command(f"kubectl apply -f {self.resource.name}")
        await self.kubectl("apply", "-f", str(self.resource))
        step.command(f"kubectl wait --for=condition=Ready sgr/{self.fleet.name}")
        rollout = await self.ready(step, START_SECONDS)
        step.result = f"{rollout.status.routable_replicas} engines are in the router"

    async def generate(self, step: Step) -> None:
        answer = await self.asked()
        self.first_text = answer.text
        step.show(f"version {answer.version}: {answer.text!r}")

    async def pause_and_continue(self, step: Step) -> None:
        async with traffic(self.router, (Request(tokens=LONG_TOKENS),) * RUNNING) as load:
            await load.more(RUNNING)
            await self.patch(step, {"execution": {"state": "Paused"}})
            await self.until(step, "every engine is paused", paused, 60)
            stopped = time.monotonic()
            arriving = [asyncio.create_task(self.router.generate()) for _ in range(ARRIVING)]
            while time.monotonic() - stopped < PAUSED_FOR:
                step.now(f"paused: {load.waiting} running and {ARRIVING} new requests wait")
                await asyncio.sleep(0.2)
            finished = [one for one in load.answers if one.received > stopped + 0.5]
            early = sum(1 for one in arriving if one.done())
            if finished or early:
                raise DeploymentError(f"{len(finished) + early} requests were answered by a paused fleet")
            step.show(f"paused for {PAUSED_FOR:.0f} s: {load.waiting} running and {ARRIVING} new requests wait")
            await self.patch(step, {"execution": {"state": "Running"}})
            waited = [await one for one in arriving]
            await self.ready(step, 60)
        self.none_failed([*load.answers, *waited])
        step.result = f"all {len(load.answers) + len(waited)} requests were answered, none failed"

    async def move_weights(self, step: Step) -> None:
        old = (await self.asked()).version
        async with traffic(self.router) as load:
            await load.more(4)
            weights = {"version": self.new_version, "source": {"type": "Disk", "disk": {"path": self.new_path}}}
            await self.patch(step, {"weights": weights})
            await self.until(step, f"version {self.new_version}", serves(self.new_version), 300)
            await load.more(4, version=self.new_version)
        self.none_failed(load.answers)
        if answers.side_by_side(load.answers, [old, self.new_version]):
            raise DeploymentError(f"version {old} answered after version {self.new_version} had begun to")
        answer = await self.asked()
        if answer.version != self.new_version or answer.text == self.first_text:
            raise DeploymentError(f"expected another text of version {self.new_version}: {answer}")
        step.show(f"version {answer.version}: {answer.text!r}")
        step.show(f"answers by version: {answers.versions(load.answers)}, never two versions at once")
        step.result = await self.stall()

    async def lose_a_pod(self, step: Step) -> None:
        pod = engine_pod_name(self.fleet.name, 0, 0)
        before = (await self.fleet.engine(0)).incarnation
        async with traffic(self.router) as load:
            await load.more(4)
            step.command(f"kubectl delete pod {pod}")
            await self.kubectl("delete", "pod", pod, "--wait=false")

            def back(one: SGLangRollout) -> bool:
                engine = next(e for e in one.status.engines if pod.startswith(e.name))
                return engine.incarnation > before and engine.routable

            await self.until(step, f"{pod} is back and in the router", back, START_SECONDS)
            await self.ready(step, 120)
            await load.more(8)
        self.none_failed(load.answers)
        if strange := answers.other_than(load.answers, {self.new_version}):
            raise DeploymentError(f"{len(strange)} answers of another version, the first: {strange[0]}")
        step.result = f"{len(load.answers)} answers meanwhile, all of version {self.new_version}, none failed"

    async def scale(self, step: Step) -> None:
        step.command(f"kubectl scale sgr/{self.fleet.name} --replicas={self.replicas + 1}")
        await self.kubectl("scale", f"sgr/{self.fleet.name}", f"--replicas={self.replicas + 1}")
        rollout = await self.ready(step, START_SECONDS)
        step.result = f"{rollout.status.routable_replicas} engines are in the router"

    async def table(self, step: Step) -> None:
        step.show(await self.kubectl("get", "sgr", "-o", "wide"))

    async def end(self, step: Step) -> None:
        step.command(f"kubectl delete sgr {self.fleet.name}")
        await self.kubectl("delete", "sgr", self.fleet.name, "--wait=false")
        begin = time.monotonic()
        while left := await self.fleet.remains():
            step.now(f"{len(left)} objects are left: {', '.join(left[:4])}")
            if time.monotonic() - begin > 180:
                raise DeploymentError(f"still there after 180 s: {', '.join(left)}")
            await asyncio.sleep(0.5)
        step.result = "nothing is left of it"

    # --- what they are made of -------------------------------------------------------------------------------------

    async def kubectl(self, *words: str) -> str:
        return await asyncio.to_thread(self.cluster.kubectl, "-n", self.namespace, *words)

    async def patch(self, step: Step, spec: dict[str, Any]) -> None:
        """Patch spec with kubectl, as shown."""
        text = json.dumps({"spec": spec})
        step.command(f"kubectl patch sgr {self.fleet.name} --type=merge -p '{text}'")
        await self.kubectl("patch", "sgr", self.fleet.name, "--type=merge", "-p", text)

    async def asked(self) -> Answer:
        answer = await self.router.generate(Request(tokens=24))
        self.none_failed([answer])
        return answer

    async def ready(self, step: Step, timeout: float) -> SGLangRollout:
        generation = (await self.fleet.read()).metadata.generation
        return await self.until(step, "Ready", ready_at(generation), timeout)

    async def until(
        self, step: Step, what: str, holds: Callable[[SGLangRollout], bool], timeout: float
    ) -> SGLangRollout:
        """Wait, showing what the resource says of itself."""

        def watched(one: SGLangRollout) -> bool:
            step.now(f"waiting until {what}: {progress(one)}")
            return holds(one)

        return await self.fleet.until(what, watched, timeout=timeout)

    async def stall(self) -> str:
        weights = (await self.fleet.read()).status.weights
        stall = weights.transaction.stall_seconds if weights and weights.transaction else None
        return f"generation stood still for {stall} s" if stall else ""

    def none_failed(self, given: list[Answer]) -> None:
        if failed := answers.failures(given):
            raise DeploymentError("requests failed: " + "; ".join(failed))


def ready_at(generation: int) -> Callable[[SGLangRollout], bool]:
    return lambda one: any(
        c.type == ConditionType.READY and c.status == "True" and c.observed_generation >= generation
        for c in one.status.conditions
    )


def serves(version: str) -> Callable[[SGLangRollout], bool]:
    def holds(one: SGLangRollout) -> bool:
        weights = one.status.weights
        return weights is not None and weights.version == version and ready_at(one.metadata.generation)(one)

    return holds


def paused(one: SGLangRollout) -> bool:
    return one.status.execution_state == "Paused" and one.status.observed_generation == one.metadata.generation


def progress(one: SGLangRollout) -> str:
    """The sentence of the condition that says most."""
    for wanted in (ConditionType.DEGRADED, ConditionType.PROGRESSING):
        for condition in one.status.conditions:
            if condition.type == wanted and condition.status == "True":
                return condition.message
    return "the operator has not answered yet" if not one.status.conditions else "settled"
