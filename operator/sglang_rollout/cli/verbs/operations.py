"""check, restart, profile, flush-cache and abort: the one-shot operations, each with a new requestID."""

from __future__ import annotations

import sys

import click

from .. import goals, patches
from ..invocation import Invocation, Verb, fleet_argument, verb, wait_options
from ..orders import Waiting, order

ACTIONS = ("Snapshot", "Reset", "Compare", "Checksum")


def _request_option(function: Verb) -> Verb:
    return click.option(
        "--request-id", metavar="ID", help="Default: a new one. The same id again asks for nothing and waits for it."
    )(function)


@click.command()
@fleet_argument
@click.argument("action", type=click.Choice(ACTIONS, case_sensitive=False))
@click.option("--yes", is_flag=True, help="Reset without being asked: it overwrites the weights.")
@_request_option
@wait_options("15m")  # longer than the operator gives it
@verb
def check(
    invocation: Invocation, name: str, action: str, yes: bool, request_id: str | None, wait: bool, timeout: float
) -> None:
    """Check the weights of all engines against each other or a snapshot."""
    if action == "Reset" and not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("Reset overwrites the weights of all engines: add --yes if you mean it")
        click.confirm(f"Overwrite the weights of all engines of {name}?", abort=True, err=True)
    request = request_id or patches.new_request_id(invocation.now())
    order(invocation, name, patches.weight_check(request, action), goals.weight_check(request), Waiting(wait, timeout))


@click.command()
@fleet_argument
@_request_option
@wait_options("1h")
@verb
def restart(invocation: Invocation, name: str, request_id: str | None, wait: bool, timeout: float) -> None:
    """Restart all engines, a few at a time (spec.weights.updateStrategy.maxUnavailable)."""
    request = request_id or patches.new_request_id(invocation.now())
    order(invocation, name, patches.restart(request), goals.restart(request), Waiting(wait, timeout))


@click.command()
@fleet_argument
@click.option("--steps", type=click.IntRange(1, 10000), default=5, show_default=True, help="Forward steps to record.")
@_request_option
@wait_options("15m")  # longer than the operator gives it
@verb
def profile(invocation: Invocation, name: str, steps: int, request_id: str | None, wait: bool, timeout: float) -> None:
    """Record a profile on all engines."""
    request = request_id or patches.new_request_id(invocation.now())
    order(invocation, name, patches.profile(request, steps), goals.profile(request), Waiting(wait, timeout))


@click.command("flush-cache")
@fleet_argument
@_request_option
@wait_options("15m")  # longer than the operator gives it
@verb
def flush_cache(invocation: Invocation, name: str, request_id: str | None, wait: bool, timeout: float) -> None:
    """Empty the KV cache of all engines. One that is busy for a minute says how to free it."""
    request = request_id or patches.new_request_id(invocation.now())
    order(invocation, name, patches.flush_cache(request), goals.flush_cache(request), Waiting(wait, timeout))


@click.command()
@fleet_argument
@_request_option
@wait_options("15m")  # longer than the operator gives it
@verb
def abort(invocation: Invocation, name: str, request_id: str | None, wait: bool, timeout: float) -> None:
    """End all requests that the engines have: clients get what there is, with finish_reason abort."""
    request = request_id or patches.new_request_id(invocation.now())
    order(invocation, name, patches.abort_requests(request), goals.abort_requests(request), Waiting(wait, timeout))
