"""One fleet of many engines: how long a spec's patch takes to the last of them, and what it costs."""

from __future__ import annotations

import asyncio
import random
import time

from e2e.bench.figures import Section
from e2e.bench.operator_program import OperatorProgram, add_cpu, add_idle
from e2e.bench.played_fleet import PlayedFleet, played_fleet
from sglang_rollout.controller.kube import KubeClient
from sglang_rollout.protocol.weights import Step

WARM_UP = 6  # patches that are not counted
PAUSE_BETWEEN = 0.2  # seconds at most, drawn anew: not in step with the operator's own periods
FAN_OUT_GOAL = "p50 < 50, p99 < 100"  # with 64 engines
BARRIER_GOAL = "<= 300 with 1,000"


async def measure(
    section: Section,
    kube: KubeClient,
    program: OperatorProgram,
    engines: int,
    patches: int,
    commits: int,
    idle_seconds: float,
) -> None:
    async with played_fleet(kube, "wide", engines) as fleet:
        section.notes.append(f"{engines} fake agents in one process, each at an address of its own; they obey at once")
        await _executions(section, fleet, program, patches)
        await _residencies(section, fleet, program, patches)
        await _commits(section, fleet, program, commits)
        await add_idle(section, f"one fleet of {engines} engines", program, idle_seconds)


async def _executions(section: Section, fleet: PlayedFleet, program: OperatorProgram, patches: int) -> None:
    """Pause and continue in turn."""
    effects: dict[bool, list[float]] = {True: [], False: []}
    ready: list[float] = []
    before = program.usage()
    for turn in range(WARM_UP + patches):
        if turn == WARM_UP:
            before = program.usage()
        paused = turn % 2 == 0
        told, in_status = await _change(fleet, program, paused, execution={"state": "Paused" if paused else "Running"})
        if turn >= WARM_UP:
            effects[paused].append(told)
            ready.append(in_status)
    engines = len(fleet.agents)
    section.add(f"spec patch to the last of {engines} agents paused", effects[True], "ms", FAN_OUT_GOAL)
    section.add(f"spec patch to the last of {engines} agents continued", effects[False], "ms", FAN_OUT_GOAL)
    section.add("the same patches to Ready for their generation, in status", ready, "ms")
    add_cpu(section, "a pause or a continue", before, program.usage(), patches)


async def _residencies(section: Section, fleet: PlayedFleet, program: OperatorProgram, patches: int) -> None:
    """Release and resume of all memory in turn; engines leave the routers before the one and return after the other."""
    effects: dict[bool, list[float]] = {True: [], False: []}
    ready: list[float] = []
    before = program.usage()
    for turn in range(WARM_UP + patches):
        if turn == WARM_UP:
            before = program.usage()
        released = turn % 2 == 0
        wanted = dict.fromkeys(("weights", "kvCache", "cudaGraph"), "Released" if released else "Resident")
        execution = {"state": "Paused" if released else "Running"}
        memory = {**wanted, "weightsBackup": "HostMemory"}
        told, in_status = await _change(fleet, program, released, released=released, execution=execution, memory=memory)
        if turn >= WARM_UP:
            effects[released].append(told)
            ready.append(in_status)
    engines = len(fleet.agents)
    section.add(f"spec patch to the last of {engines} agents released", effects[True], "ms", FAN_OUT_GOAL)
    section.add(f"spec patch to the last of {engines} agents resumed and running", effects[False], "ms", FAN_OUT_GOAL)
    section.add("the same patches to Ready for their generation, in status", ready, "ms")
    add_cpu(section, "a release or a resume", before, program.usage(), patches)


async def _change(
    fleet: PlayedFleet,
    program: OperatorProgram,
    paused: bool,
    version: str = "",
    released: bool = False,
    **spec: object,
) -> tuple[float, float]:
    """Milliseconds from the patch's sending until all agents were there, and until the status said so."""
    program.must_run()
    await asyncio.sleep(random.uniform(0.0, PAUSE_BETWEEN))

    def there() -> bool:
        engines = (agent.report.engine for agent in fleet.agents)
        return all(
            one.paused is paused and bool(one.released) is released and version in ("", one.weight_version)
            for one in engines
        )

    started = time.monotonic()
    patch = asyncio.create_task(fleet.patch(**spec))
    told = await fleet.until(there, f"all agents at {spec}")
    ready = await fleet.until_ready(await patch)
    return 1e3 * (told - started), 1e3 * (ready - started)


async def _commits(section: Section, fleet: PlayedFleet, program: OperatorProgram, commits: int) -> None:
    """Moves of the weights of all engines at once: prepare, pause, apply, continue, each a barrier."""
    stalls: list[float] = []
    fleet_stalls: list[float] = []
    served: list[float] = []
    ready: list[float] = []
    before = program.usage()
    for turn in range(1, commits + 1):
        version = f"v{turn}"
        source = {"type": "Disk", "disk": {"path": f"/models/{version}"}}
        weights = {"version": version, "source": source}
        told, in_status = await _change(fleet, program, False, version, weights=weights)
        served.append(told)
        ready.append(in_status)
        paused = [agent.reached_at[Step.PAUSE] for agent in fleet.agents]
        continued = [agent.reached_at[Step.CONTINUE] for agent in fleet.agents]
        fleet_stalls.append(1e3 * (max(continued) - min(paused)))
        stalls += [1e3 * (end - begin) for begin, end in zip(paused, continued, strict=True)]
    engines = len(fleet.agents)
    section.add(f"weight move, {engines} agents: first paused to last continued", fleet_stalls, "ms", BARRIER_GOAL)
    section.add("weight move: pause to continue of each agent", stalls, "ms")
    section.add("weight move: spec patch to the last agent serving the new version", served, "ms")
    section.add("weight move: spec patch to Ready at the new version, in status", ready, "ms")
    add_cpu(section, "a weight move", before, program.usage(), commits)
