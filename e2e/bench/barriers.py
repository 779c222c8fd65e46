"""One fleet of very many engines: how long its barriers take, and how long it stands still for them."""

from __future__ import annotations

import asyncio
import random

from e2e.bench import usage
from e2e.bench.figures import Section
from e2e.bench.operator_program import OperatorProgram, add_cpu
from e2e.bench.played_fleet import PlayedFleet, played_fleet
from e2e.cluster.errors import ClusterError
from sglang_rollout.controller.kube import KubeClient
from sglang_rollout.protocol.weights import Step

WARM_UP = 2  # moves that are not counted
PAUSE_BETWEEN = 2.0  # seconds at most, drawn anew: not in step with the operator's own periods
GOAL = "<= 300"
STEPS = {Step.PAUSE: "all prepared to all told to pause", Step.APPLY: "all paused to all told to apply",
         Step.CONTINUE: "all applied to all told to continue"}  # fmt: skip


async def measure(section: Section, kube: KubeClient, program: OperatorProgram, engines: int, moves: int) -> None:
    """A barrier: from the last agent's report of a step to the last agent's having the order of the next."""
    async with played_fleet(kube, "barrier", engines) as fleet:
        section.notes.append(f"{engines} fake agents in one process, each at an address of its own; they obey at once,")
        section.notes.append("so what is behind a barrier comes to the operator at one moment: no fleet is worse")
        barriers: dict[Step, list[float]] = {step: [] for step in STEPS}
        fleet_stalls: list[float] = []
        stalls: list[float] = []
        before, fakes = program.usage(), fleet.server.cpu
        for turn in range(WARM_UP + moves):
            if turn == WARM_UP:
                before, fakes = program.usage(), fleet.server.cpu
            await _move(fleet, program, f"b{turn}")
            if turn < WARM_UP:
                continue
            agents = fleet.agents
            for step, values in barriers.items():
                reported = max(agent.reached_at[Step(step - 1)] for agent in agents)
                values.append(1e3 * (max(agent.ordered_at[step] for agent in agents) - reported))
            paused = min(agent.ordered_at[Step.PAUSE] for agent in agents)
            fleet_stalls.append(1e3 * (max(agent.reached_at[Step.CONTINUE] for agent in agents) - paused))
            stalls += [1e3 * agent.stalls[-1] for agent in agents]
    for step, values in barriers.items():
        section.add(f"barrier of {engines}: {STEPS[step]}", values, "ms", GOAL if step != Step.PAUSE else "")
    section.add("first told to pause to last continued", fleet_stalls, "ms")
    section.add("pause to continue of each agent", stalls, "ms")
    add_cpu(section, "a weight move", before, program.usage(), moves)
    section.add("CPU of all fakes for a weight move", [1e3 * (fleet.server.cpu - fakes) / moves], "ms")
    section.add("operator RSS", usage.mebibytes([program.usage().peak]), "MiB")


async def _move(fleet: PlayedFleet, program: OperatorProgram, version: str) -> None:
    program.must_run()
    await asyncio.sleep(random.uniform(0.0, PAUSE_BETWEEN))
    source = {"type": "Disk", "disk": {"path": f"/models/{version}"}}
    generation = await fleet.patch(weights={"version": version, "source": source})
    try:
        await fleet.until_ready(generation, 120)
    except ClusterError as error:
        program.must_run()
        behind = [agent for agent in fleet.agents if agent.report.engine.weight_version != version]
        steps = {str(agent.report.move and agent.report.move.reached) for agent in behind}
        raise ClusterError(f"{error}; {len(behind)} agents behind, at {steps}; {program.complaints()[-5:]}") from error
