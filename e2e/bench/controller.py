"""The operator's process alone, against a real API server: one wide fleet, and many small ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from e2e.bench import barriers, machine, many_fleets, order_calls, wide_fleet
from e2e.bench.figures import Section
from e2e.bench.operator_program import OperatorProgram, api_server, client, operator
from e2e.cluster import versions
from e2e.cluster.progress import say


@dataclass(frozen=True)
class Size:
    """agents: engines of the wide fleet. patches: of its execution. commits: of its weights. resources: small fleets.
    idle_seconds: how long idling is watched."""

    agents: int = 64
    patches: int = 200
    commits: int = 50
    resources: int = 300
    idle_seconds: float = 60.0


async def measure_barriers(engines: int, moves: int, command: str, profile: Path | None = None) -> Section:
    """One fleet of very many engines and nothing else; takes a few minutes."""
    section = _section("barrier", "The barriers of a fleet of very many engines", command)
    await order_calls.measure(section, engines)
    with api_server() as server:
        async with operator(server, profile and profile / "barrier.prof") as program, client(server) as kube:
            say(f"one fleet of {engines} engines")
            await barriers.measure(section, kube, program, engines, moves)
            _tell_complaints(program)
    return section


async def measure(size: Size, command: str, profile: Path | None = None) -> Section:
    """All of it; takes a few minutes. profile: folder for cProfile's figures of the operator, which is slower by half
    with it."""
    section = _section("controller", "The operator alone, on a real API server", command)
    if size.agents:
        with api_server() as server:
            async with operator(server, profile and profile / "wide.prof") as program, client(server) as kube:
                say(f"one fleet of {size.agents} engines")
                await wide_fleet.measure(
                    section, kube, program, size.agents, size.patches, size.commits, size.idle_seconds
                )
                _tell_complaints(program)
    if size.resources:
        with api_server() as server:
            async with operator(server, profile and profile / "many.prof") as program, client(server) as kube:
                say(f"{size.resources} fleets")
                await many_fleets.measure(section, kube, program, size.resources, size.idle_seconds)
                _tell_complaints(program)
    return section


def _section(name: str, title: str, command: str) -> Section:
    told = {
        "Kubernetes": versions.KUBERNETES,
        "etcd": versions.ETCD,
        **machine.library_versions("kopf", "aiohttp", "kubernetes"),
    }
    section = Section(name, title, command, machine.describe(told))
    section.notes.append("operator, API server, etcd and the fakes of all pods share the cores")
    return section


def _tell_complaints(program: OperatorProgram) -> None:
    """Figures of an operator that struggled are worth little."""
    for line in program.complaints()[:10]:
        say(f"the operator said: {line}")
