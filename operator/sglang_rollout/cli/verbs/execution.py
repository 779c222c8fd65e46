"""pause and continue: spec.execution."""

from __future__ import annotations

import click

from .. import goals, patches
from ..invocation import Invocation, fleet_argument, verb, wait_options
from ..orders import Waiting, order


@click.command()
@fleet_argument
@click.option(
    "--mode",
    type=click.Choice(["Abort", "Retract", "InPlace"], case_sensitive=False),
    help="What becomes of running requests. Abort: they end. Retract: they wait and recompute their KV cache."
    " InPlace: they freeze with it. Default: as spec.execution.pauseMode is.",
)
@wait_options("5m")
@verb
def pause(invocation: Invocation, name: str, mode: str | None, wait: bool, timeout: float) -> None:
    """Stop generating on all engines; requests wait."""
    order(invocation, name, patches.execution("Paused", mode), goals.execution("Paused"), Waiting(wait, timeout))


@click.command("continue")
@fleet_argument
@wait_options("5m")
@verb
def continue_(invocation: Invocation, name: str, wait: bool, timeout: float) -> None:
    """Generate again on all engines."""
    order(invocation, name, patches.execution("Running"), goals.execution("Running"), Waiting(wait, timeout))
