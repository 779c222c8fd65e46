"""release and resume: spec.memory."""

from __future__ import annotations

from collections.abc import Callable

import click

from ...kube_access.failures import Refused
from .. import goals, patches
from ..invocation import Invocation, Verb, fleet_argument, verb, wait_options
from ..orders import Waiting, order


def _tag_options(function: Verb) -> Verb:
    add: list[Callable[[Verb], Verb]] = [
        click.option("--weights", is_flag=True, help="The model's weights."),
        click.option("--kv", is_flag=True, help="The KV cache."),
        click.option("--graphs", is_flag=True, help="Captured CUDA graphs."),
    ]
    for option in reversed(add):
        function = option(function)
    return function


def _tags(weights: bool, kv: bool, graphs: bool) -> list[str]:
    """Those that were named; none: all."""
    chosen = [tag for tag, named in zip(patches.TAGS, (weights, kv, graphs), strict=True) if named]
    return chosen or list(patches.TAGS)


@click.command()
@fleet_argument
@_tag_options
@click.option("--pause", "also_pause", is_flag=True, help="Pause in the same step: only a paused fleet can release.")
@wait_options("10m")
@verb
def release(
    invocation: Invocation,
    name: str,
    weights: bool,
    kv: bool,
    graphs: bool,
    also_pause: bool,
    wait: bool,
    timeout: float,
) -> None:
    """Give GPU memory to others, e.g. a trainer on the same GPUs. Without options: all of it."""
    tags = _tags(weights, kv, graphs)
    patch = patches.memory("Released", tags, "Paused" if also_pause else None)
    try:
        order(invocation, name, patch, goals.memory("Released", tags), Waiting(wait, timeout))
    except Refused as refused:
        if "set execution.state Paused" not in refused.message:
            raise
        raise Refused(f"{refused.message}\n(kubectl sgrollout release --pause does both)") from refused


@click.command()
@fleet_argument
@_tag_options
@click.option("--continue", "also_continue", is_flag=True, help="Generate again, in the same step.")
@wait_options("10m")
@verb
def resume(
    invocation: Invocation,
    name: str,
    weights: bool,
    kv: bool,
    graphs: bool,
    also_continue: bool,
    wait: bool,
    timeout: float,
) -> None:
    """Take GPU memory back. Without options: all of it. The fleet stays paused, unless --continue."""
    tags = _tags(weights, kv, graphs)
    state = "Running" if also_continue else None
    order(
        invocation,
        name,
        patches.memory("Resident", tags, state),
        goals.memory("Resident", tags, state),
        Waiting(wait, timeout),
    )
