"""python -m e2e.bench [controller | barrier | cluster]: measure, print a table, write it into docs/performance.md."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from rich.console import Console

from e2e.bench import cluster, controller, document, machine
from e2e.bench.figures import Section
from e2e.cluster.errors import ClusterError

TABLE_WIDTH = 140


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m e2e.bench", description=__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    alone = commands.add_parser("controller", help="the operator alone, on a bare API server; minutes, no cluster")
    size = controller.Size()
    alone.add_argument("--agents", type=int, default=size.agents, help="engines of the wide fleet; 0: leave it out")
    alone.add_argument("--patches", type=int, default=size.patches, help="pauses and continues of the wide fleet")
    alone.add_argument("--commits", type=int, default=size.commits, help="weight moves of the wide fleet")
    alone.add_argument("--resources", type=int, default=size.resources, help="small fleets; 0: leave them out")
    alone.add_argument("--idle-seconds", type=float, default=size.idle_seconds)
    alone.add_argument("--profile", type=Path, help="a folder for cProfile's figures of the operator")
    barrier = commands.add_parser("barrier", help="barriers of a very large fleet, on a bare API server; minutes")
    barrier.add_argument("--agents", type=int, default=1000, help="engines of the fleet")
    barrier.add_argument("--moves", type=int, default=20, help="moves of its weights")
    barrier.add_argument("--profile", type=Path, help="a folder for cProfile's figures of the operator")
    whole = commands.add_parser("cluster", help="everything on the local cluster, with real engines; a quarter hour")
    counts = cluster.Size()
    whole.add_argument("--pauses", type=int, default=counts.pauses, help="pauses and continues")
    whole.add_argument("--moves", type=int, default=counts.moves, help="moves of the weights, from disk")
    whole.add_argument("--losses", type=int, default=counts.losses, help="pods killed, and processes killed")
    whole.add_argument("--idle-seconds", type=float, default=counts.idle_seconds)
    for command in (alone, barrier, whole):
        command.add_argument("--dry", action="store_true", help="leave docs/performance.md as it is")
    options = parser.parse_args()
    try:
        section = _measure(options)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    section.notes.append(f"load average when it ended: {machine.load()}")
    Console(width=TABLE_WIDTH).print(section.table())
    if not options.dry:
        document.put(section.name, section.markdown())
        print(f"written to {document.DOCUMENT}")
    return 0


def _measure(options: argparse.Namespace) -> Section:
    if options.what == "cluster":
        counts = cluster.Size(options.pauses, options.moves, options.losses, options.idle_seconds)
        return asyncio.run(cluster.measure(counts, _command("make bench")))
    if options.profile is not None:
        options.profile.mkdir(parents=True, exist_ok=True)
    if options.what == "barrier":
        command = _command("make bench-barrier")
        return asyncio.run(controller.measure_barriers(options.agents, options.moves, command, options.profile))
    size = controller.Size(options.agents, options.patches, options.commits, options.resources, options.idle_seconds)
    return asyncio.run(controller.measure(size, _command("make bench-controller"), options.profile))


def _command(verb: str) -> str:
    """As it was given to make."""
    words = " ".join(sys.argv[2:])
    return f'{verb} ARGS="{words}"' if words else verb


if __name__ == "__main__":
    sys.exit(main())
