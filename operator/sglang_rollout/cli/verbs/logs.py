"""logs: of all engines at once, each line with its pod."""

from __future__ import annotations

import click

from ...api import names
from ..invocation import Duration, Invocation, fleet_argument, verb
from ..log_reader import LogReader, Selection


@click.command()
@fleet_argument
@click.option("-f", "--follow", is_flag=True, help="Stay, over restarts and new pods too.")
@click.option("-c", "--container", default=names.CONTAINER_ENGINE, show_default=True, help="engine, agent or inject.")
@click.option("--router", is_flag=True, help="The router's pods instead (containers router and sidecar).")
@click.option("--engine", type=click.IntRange(0), help="Only the engine of this index.")
@click.option("--since", type=Duration(), help="Only lines of the last 90s, 5m, 1h.")
@click.option("--tail", type=click.IntRange(0), help="Lines of each pod. Default: 100 without --since, else all.")
@click.option("-p", "--previous", is_flag=True, help="Of the container's run before the present one.")
@click.option("--timestamps", is_flag=True, help="With the time of each line.")
@verb
def logs(
    invocation: Invocation,
    name: str,
    follow: bool,
    container: str,
    router: bool,
    engine: int | None,
    since: float | None,
    tail: int | None,
    previous: bool,
    timestamps: bool,
) -> None:
    """Show the logs of all engines, each line with its pod in front."""
    if router and container == names.CONTAINER_ENGINE:
        container = names.CONTAINER_ROUTER
    if router and engine is not None:
        raise click.UsageError("--router and --engine exclude each other")
    if follow and previous:
        raise click.UsageError("--previous is over: it cannot be followed")
    labels = {names.LABEL_FLEET: name, names.LABEL_COMPONENT: names.COMPONENT_ENGINE}
    if router:
        labels[names.LABEL_COMPONENT] = names.COMPONENT_ROUTER
    if engine is not None:
        labels[names.LABEL_ENGINE] = str(engine)
    selector = ",".join(f"{key}={value}" for key, value in labels.items())
    first_lines = 100 if tail is None and since is None else tail
    reader = LogReader(invocation, Selection(selector, container, since, first_lines, previous), timestamps)
    if follow:
        reader.follow()
    else:
        reader.once()
