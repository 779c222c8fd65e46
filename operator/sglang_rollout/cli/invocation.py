"""What all verbs share on the command line: where the cluster is, how to answer, how long to wait."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import click
from rich.console import Console

from ..api.group import GROUP, PLURAL, SHORT_NAME, SINGULAR
from ..kube_access.cluster import Cluster
from ..kube_access.connection import connect
from ..kube_access.failures import Failure
from .durations import parse_duration
from .exits import ExitCode, end_of

FIELD_MANAGER = "kubectl-sgrollout"
PIPE_COLUMNS = 200  # of tables that go into a pipe, where nobody resizes a window

Verb = Callable[..., None]


def reach(kubeconfig: str | None, context: str | None, namespace: str | None) -> Cluster:
    return Cluster(connect(kubeconfig, context, namespace), FIELD_MANAGER)


@dataclass(frozen=True)
class Surroundings:
    """What tests put in the place of: the cluster and the clock."""

    connect: Callable[[str | None, str | None, str | None], Cluster] = reach
    now: Callable[[], datetime] = lambda: datetime.now(UTC)


@dataclass(frozen=True)
class Invocation:
    """One call of a verb. Answers go to stdout; progress, warnings and errors to stderr."""

    verb: str
    json_output: bool
    cluster: Cluster
    now: Callable[[], datetime]
    out: Console = field(default_factory=lambda: console(stderr=False))
    err: Console = field(default_factory=lambda: console(stderr=True))

    def print_json(self, value: Any, *, compact: bool = False) -> None:
        """compact: on one line, for streams."""
        click.echo(json.dumps(value, indent=None if compact else 2))

    def say(self, text: str) -> None:
        """A line for the person who waits."""
        self.err.print(text, markup=False, highlight=False, soft_wrap=True)


def console(*, stderr: bool) -> Console:
    plain = Console(stderr=stderr)
    if plain.is_terminal or "COLUMNS" in os.environ:
        return plain
    return Console(stderr=stderr, width=PIPE_COLUMNS)


class FleetName(click.ParamType[str]):
    """NAME, or TYPE/NAME as kubectl prints it."""

    name = "name"
    _types = frozenset({SHORT_NAME, SINGULAR, PLURAL, f"{SINGULAR}.{GROUP}", f"{PLURAL}.{GROUP}"})

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        kind, _, name = str(value).rpartition("/")
        if kind and kind.lower() not in self._types:
            self.fail(f"{value!r} is no SGLangRollout: write its name, or sgr/NAME", param, ctx)
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", name):
            self.fail(f"{name!r} cannot be the name of a fleet: a-z, 0-9 and '-'", param, ctx)
        return name


class Duration(click.ParamType[float]):
    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            return parse_duration(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def verb(function: Verb) -> Verb:
    """Adds the options of every verb, and gives it an Invocation as its first argument."""

    @click.option("-n", "--namespace", metavar="NAMESPACE", help="Default: the namespace of the context.")
    @click.option("--context", metavar="CONTEXT", help="Context of the kubeconfig.")
    @click.option("--kubeconfig", metavar="FILE", help="Default: $KUBECONFIG, then ~/.kube/config.")
    @click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", help="json: for scripts.")
    @click.pass_context
    @functools.wraps(function)
    def wrapped(
        ctx: click.Context,
        /,
        *,
        namespace: str | None,
        context: str | None,
        kubeconfig: str | None,
        output: str,
        **rest: Any,
    ) -> None:
        surroundings: Surroundings = ctx.obj
        name = _verb_name(ctx)
        try:
            cluster = surroundings.connect(kubeconfig, context, namespace)
            function(Invocation(name, output == "json", cluster, surroundings.now), **rest)
        except Failure as failure:
            end = end_of(failure)
            if output == "json":
                answer = {"verb": name, "outcome": end.outcome, "message": failure.message}
                click.echo(json.dumps(answer | {"exitCode": int(end.code)}, indent=2))
            click.echo(f"Error: {failure.message}", err=True)
            ctx.exit(int(end.code))
        except KeyboardInterrupt:
            ctx.exit(int(ExitCode.INTERRUPTED))

    return wrapped


def fleet_argument(function: Verb) -> Verb:
    return click.argument("name", type=FleetName(), metavar="NAME")(function)


def wait_options(default: str) -> Callable[[Verb], Verb]:
    """--wait/--no-wait and --timeout."""

    def add(function: Verb) -> Verb:
        timed = click.option(
            "--timeout", type=Duration(), default=default, show_default=True, help="How long to wait: 90s, 5m, 1h."
        )(function)
        return click.option("--wait/--no-wait", default=True, help="Wait until it is done (default).")(timed)

    return add


def _verb_name(ctx: click.Context) -> str:
    """`weights set`: the words after the program's own."""
    words: list[str] = []
    while ctx.parent is not None:
        words.insert(0, ctx.info_name or "")
        ctx = ctx.parent
    return " ".join(words)
