"""weights set, wait and history: spec.weights and status.weights."""

from __future__ import annotations

import click
from rich.text import Text

from ...kube_access.failures import Failure
from .. import goals, patches
from ..fleet_report import parse
from ..goals import Asked
from ..invocation import Duration, Invocation, fleet_argument, verb, wait_options
from ..orders import Deadline, Waiting, await_goal, order
from ..tables import age, plain_table


@click.group()
def weights() -> None:
    """Move a fleet to other weights, wait for it, look back."""


@weights.command("set")
@fleet_argument
@click.argument("version")
@click.option("--path", required=True, help="Folder of the checkpoint, as the engines see it.")
@wait_options("30m")
@verb
def set_(invocation: Invocation, name: str, version: str, path: str, wait: bool, timeout: float) -> None:
    """Serve VERSION, a label of yours, from a checkpoint on disk."""
    order(invocation, name, patches.disk_weights(version, path), goals.weights(version), Waiting(wait, timeout))


@weights.command("wait")
@fleet_argument
@click.argument("version", required=False)
@click.option("--timeout", type=Duration(), default="30m", show_default=True, help="How long to wait: 90s, 5m, 1h.")
@verb
def wait_(invocation: Invocation, name: str, version: str | None, timeout: float) -> None:
    """Wait until all engines serve VERSION, whoever asks for it; absent: what spec asks for now."""
    deadline = Deadline.after(timeout)
    rollout = parse(invocation.cluster.rollout(name))
    target = rollout.status.weights.target_version if rollout.status.weights else ""
    wanted = version or rollout.spec.weights.version or target
    if not wanted:
        raise Failure(
            f"{name} names no version in spec.weights.version and serves none yet: name the VERSION to wait for"
        )
    await_goal(invocation, name, Asked(rollout.metadata.generation, {}, goals.weights(wanted)), deadline, timeout)


@weights.command()
@fleet_argument
@verb
def history(invocation: Invocation, name: str) -> None:
    """Versions that the fleet has served, newest last."""
    rollout = parse(invocation.cluster.rollout(name))
    now = rollout.status.weights
    entries = now.history if now else ()
    current = now.version if now else ""
    if invocation.json_output:
        items = [entry.to_object() | {"current": entry.version == current} for entry in entries]
        invocation.print_json({"namespace": rollout.metadata.namespace, "name": name, "items": items})
        return
    if not entries:
        invocation.say(f"{name} has not served any version yet")
        return
    table = plain_table("VERSION", "SINCE", "", "PATH", right=("SINCE",))
    for entry in entries:
        table.add_row(
            Text(entry.version),
            age(entry.committed_at, invocation.now()),
            Text("current" if entry.version == current else "", style="green"),
            Text(entry.path),
        )
    invocation.out.print(table)
