"""Many small fleets whose pods never come: what each costs, how fast they are taken in, what they cost at rest."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from e2e.bench import usage
from e2e.bench.figures import Section
from e2e.bench.operator_program import FLEET_NAMESPACE, OperatorProgram, add_cpu, add_idle
from e2e.bench.played_fleet import resource
from e2e.cluster.errors import ClusterError
from sglang_rollout.controller.kinds import DEPLOYMENT, ROLLOUT, STATEFUL_SET
from sglang_rollout.controller.kube import KubeClient

AT_ONCE = 16  # calls of the measuring client
SINGLE_PATCHES = 200
SETTLED_SECONDS = 3.0


@dataclass
class Answered:
    """By name, the generation that a resource's status answers."""

    generations: dict[str, int] = field(default_factory=dict)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def follow(self, kube: KubeClient, since: str) -> None:
        """For ever."""
        while True:
            async with aclosing(kube.watch(ROLLOUT, FLEET_NAMESPACE, since, seconds=1800)) as changes:
                async for kind, value in changes:
                    since = value["metadata"]["resourceVersion"]
                    if kind in ("ADDED", "MODIFIED"):
                        answered = (value.get("status") or {}).get("observedGeneration", 0)
                        self.generations[value["metadata"]["name"]] = answered
                        self.news.set()

    async def until(self, names: Sequence[str], generation: int, seconds: float = 600.0) -> float:
        """When all of them had answered, in monotonic seconds."""
        waiting = set(names)
        try:
            async with asyncio.timeout(seconds):
                while waiting := {name for name in waiting if self.generations.get(name, 0) < generation}:
                    self.news.clear()
                    await self.news.wait()
        except TimeoutError:
            raise ClusterError(f"{len(waiting)} fleets have not answered generation {generation}") from None
        return time.monotonic()


async def measure(
    section: Section, kube: KubeClient, program: OperatorProgram, fleets: int, idle_seconds: float
) -> None:
    section.notes.append(f"{fleets} fleets of one engine, without pods")
    answered = Answered()
    _, since = await kube.list(ROLLOUT, FLEET_NAMESPACE)
    following = asyncio.create_task(answered.follow(kube, since))
    names = [f"small-{number}" for number in range(fleets)]
    try:
        await asyncio.sleep(SETTLED_SECONDS)
        section.add("operator RSS without fleets", usage.mebibytes([program.usage().rss]), "MiB")
        await _created(section, kube, program, answered, names)
        await add_idle(section, f"{fleets} fleets", program, idle_seconds)
        await _patched(section, kube, program, answered, names)
        await _one_among_many(section, kube, answered, names)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def _created(
    section: Section, kube: KubeClient, program: OperatorProgram, answered: Answered, names: Sequence[str]
) -> None:
    before = program.usage()
    started = time.monotonic()
    await _side_by_side(kube.create(ROLLOUT, resource(name, 1)) for name in names)
    section.add(f"{len(names)} fleets created at once: sent", [time.monotonic() - started], "s")
    status = await answered.until(names, 1)
    section.add(f"{len(names)} fleets created at once: all have a status", [status - started], "s")
    children = await _all_children(kube, len(names))
    section.add(f"{len(names)} fleets created at once: all children exist", [children - started], "s")
    await asyncio.sleep(SETTLED_SECONDS)
    add_cpu(section, "a new fleet (11 children)", before, program.usage(), len(names))


async def _all_children(kube: KubeClient, fleets: int, seconds: float = 600.0) -> float:
    """When each fleet has what is made last."""
    deadline = time.monotonic() + seconds
    while True:
        lists = [await kube.list(kind, FLEET_NAMESPACE) for kind in (STATEFUL_SET, DEPLOYMENT)]
        if all(len(items) >= fleets for items, _ in lists):
            return time.monotonic()
        if time.monotonic() > deadline:
            raise ClusterError(f"the children of {fleets} fleets were not made in {seconds:.0f} s")
        await asyncio.sleep(0.5)


async def _patched(
    section: Section, kube: KubeClient, program: OperatorProgram, answered: Answered, names: Sequence[str]
) -> None:
    before = program.usage()
    started = time.monotonic()
    patch = {"spec": {"execution": {"state": "Paused"}}}
    await _side_by_side(kube.merge(ROLLOUT, FLEET_NAMESPACE, name, patch) for name in names)
    seconds = await answered.until(names, 2) - started
    section.add(f"{len(names)} specs patched at once: answered in status", [len(names) / seconds], "per s")
    await asyncio.sleep(SETTLED_SECONDS)
    add_cpu(section, "a patched spec", before, program.usage(), len(names))


async def _one_among_many(section: Section, kube: KubeClient, answered: Answered, names: Sequence[str]) -> None:
    delays = []
    patch = {"spec": {"execution": {"state": "Running"}}}
    for name in names[:SINGLE_PATCHES]:
        started = time.monotonic()
        await kube.merge(ROLLOUT, FLEET_NAMESPACE, name, patch)
        delays.append(1e3 * (await answered.until([name], 3) - started))
    section.add(f"spec patch to its answer in status, one of {len(names)} fleets", delays, "ms")


async def _side_by_side(calls: Iterable[Awaitable[object]]) -> None:
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(call: Awaitable[object]) -> None:
        async with slots:
            await call

    await asyncio.gather(*(one(call) for call in calls))
