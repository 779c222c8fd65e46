"""status: one fleet or all of a namespace, once or live."""

from __future__ import annotations

from collections.abc import Callable

import click
from rich.console import RenderableType
from rich.live import Live

from ..fleet_report import FleetReport, parse, report
from ..invocation import FleetName, Invocation, verb
from ..tables import fleet_view, fleets_table, one_line

FOREVER_SECONDS = 10 * 365 * 86400.0


@click.command()
@click.argument("name", type=FleetName(), required=False)
@click.option("-w", "--watch", is_flag=True, help="Stay, and show every change.")
@click.option("--all", "all_engines", is_flag=True, help="All engines of a large fleet.")
@verb
def status(invocation: Invocation, name: str | None, watch: bool, all_engines: bool) -> None:
    """Show a fleet: its conditions, weights and engines. Without NAME: all fleets of the namespace."""
    if name is None:
        if watch:
            raise click.UsageError("--watch needs the NAME of a fleet")
        _list(invocation)
    elif watch:
        _watch(invocation, name, all_engines)
    else:
        one = report(parse(invocation.cluster.rollout(name)))
        if invocation.json_output:
            invocation.print_json(one.to_object())
        else:
            invocation.out.print(fleet_view(one, invocation.now(), all_engines=all_engines))


def _list(invocation: Invocation) -> None:
    reports = [report(parse(one)) for one in invocation.cluster.rollouts()]
    if invocation.json_output:
        invocation.print_json({"items": [one.to_object() for one in reports]})
    elif reports:
        invocation.out.print(fleets_table(reports, invocation.now()))
    else:
        invocation.say(f"no fleets in namespace {invocation.cluster.namespace}")


def _watch(invocation: Invocation, name: str, all_engines: bool) -> None:
    """In a terminal a picture that moves, with ages that grow; else a line, or an object, for each change."""
    latest: list[FleetReport] = []

    def picture() -> RenderableType:
        return fleet_view(latest[-1], invocation.now(), all_engines=all_engines) if latest else ""

    def changes(show: Callable[[FleetReport], None]) -> None:
        said: FleetReport | None = None
        for current in invocation.cluster.follow(name, lambda: FOREVER_SECONDS, invocation.say):
            one = report(parse(current))
            if one != said:
                said = one
                show(one)

    if invocation.json_output:
        changes(lambda one: invocation.print_json(one.to_object(), compact=True))
    elif not invocation.out.is_terminal:
        changes(lambda one: invocation.out.print(one_line(one), markup=False, highlight=False, soft_wrap=True))
    else:
        with Live(get_renderable=picture, console=invocation.out, refresh_per_second=4):
            changes(lambda one: latest.__setitem__(slice(None), [one]))
