"""Fleets drawn for a terminal: every word stands without its colour, and 80 columns are enough."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..api import Condition, EngineStatus, WeightsStatus
from ..api.conditions import parse_timestamp
from .durations import duration_text
from .fleet_report import FleetReport

BAR_WIDTH = 24
ENGINES_SHOWN = 24
_BAD_WHEN_TRUE = frozenset({"Degraded"})
_NEUTRAL = frozenset({"Progressing", "Paused"})
_STATE_STYLES = {"routable": "green", "paused": "yellow", "released": "yellow", "starting": "cyan"}


def plain_table(*columns: str, right: Iterable[str] = ()) -> Table:
    """As kubectl draws tables: capitals, no lines."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    numbers = set(right)
    for column in columns:
        last = column == columns[-1]
        table.add_column(column, justify="right" if column in numbers else "left", no_wrap=not last, overflow="fold")
    return table


def age(since: str, now: datetime) -> str:
    """How long ago an RFC 3339 time was; empty: unknown."""
    return duration_text(max(0, int((now - parse_timestamp(since)).total_seconds()))) if since else ""


def fleets_table(reports: Sequence[FleetReport], now: datetime) -> RenderableType:
    table = plain_table(
        "NAME", "READY", "ROUTABLE", "STATE", "WEIGHTS", "AGE", "STATUS", right=("READY", "ROUTABLE", "AGE")
    )
    for one in reports:
        status = one.status
        table.add_row(
            Text(one.name),
            f"{status.ready_replicas}/{one.wanted.replicas}",
            f"{status.routable_replicas}/{one.wanted.replicas}",
            Text(status.execution_state or ""),
            Text(_versions(status.weights)),
            age(one.created, now),
            Text(one.reason if one.answered else "not answered yet", style="green" if one.ready else "yellow"),
        )
    return table


def fleet_view(one: FleetReport, now: datetime, *, all_engines: bool = False) -> RenderableType:
    """The whole fleet: its state, what it is at, conditions, engines, what was asked for last."""
    parts: list[RenderableType] = [_headline(one, now), _facts(one), Text()]
    if one.status.conditions:
        parts += [_conditions(one.status.conditions, one.generation, one.message, now), Text()]
    parts += _engines(one.status.engines, all_engines)
    operations = list(_operations(one, now))
    if operations:
        parts += [Text(), *operations]
    return Group(*parts)


def one_line(one: FleetReport) -> str:
    """For logs and pipes."""
    status = one.status
    of = one.wanted.replicas
    return (
        f"{one.namespace}/{one.name} {'Ready' if one.ready else 'NotReady'} {one.reason or '-'}"
        f" ready={status.ready_replicas}/{of} routable={status.routable_replicas}/{of}"
        f" state={status.execution_state or '-'} weights={_versions(status.weights) or '-'}: {one.message}"
    )


def bar(done: int, of: int, words: str) -> RenderableType:
    row = Table.grid(padding=(0, 1))
    style = "green" if done >= of else "yellow"
    drawn = ProgressBar(total=max(1, of), completed=done, width=BAR_WIDTH, complete_style=style, finished_style=style)
    row.add_row(drawn, Text(f"{done}/{of} {words}"))
    return row


def engine_state(engine: EngineStatus) -> str:
    """One word for where an engine is."""
    if engine.released:
        return "released"
    if engine.paused:
        return "paused"
    if engine.routable:
        return "routable"
    return "gated" if engine.ready else "starting"


def _versions(weights: WeightsStatus | None) -> str:
    if weights is None:
        return ""
    if weights.target_version and weights.target_version != weights.version:
        return f"{weights.version or '-'} -> {weights.target_version}"
    return weights.version


def _headline(one: FleetReport, now: datetime) -> RenderableType:
    word, style = ("Ready", "bold green") if one.ready else ("Not ready", "bold yellow")
    line = Text.assemble((f"{one.namespace}/{one.name}", "bold"), "  ", (word, style))
    if one.created:
        line.append(f"  {age(one.created, now)} old", "dim")
    line.append(f"\n{one.message}")
    return line


def _facts(one: FleetReport) -> RenderableType:
    status, wanted = one.status, one.wanted
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("engines", bar(status.ready_replicas, wanted.replicas, "ready"))
    table.add_row("router", bar(status.routable_replicas, wanted.replicas, "routable"))
    weights = status.weights
    table.add_row("weights", Text(_versions(weights) + (f"  {weights.phase}" if weights else "")))
    if weights and weights.transaction and weights.phase not in ("Idle", "Failed"):
        move = weights.transaction
        table.add_row("", bar(move.prepared, wanted.replicas, f"hold {move.version}, checked"))
        table.add_row("", bar(move.committed, wanted.replicas, f"serve {move.version}"))
    state = status.execution_state or "unknown"
    pending = f", asked: {wanted.execution_state}" if wanted.execution_state != state else ""
    table.add_row(
        "state", Text(f"{state}{pending}" + (" (driven by a trainer)" if wanted.control == "External" else ""))
    )
    memory = status.memory.to_object() if status.memory else {}
    changes = [f"{tag} {memory.get(tag, 'unknown')}, asked: {asked}" for tag, asked in wanted.memory.items()
               if memory.get(tag, "Resident") != asked]  # fmt: skip
    released = [tag for tag, residency in memory.items() if residency == "Released"]
    if changes or released:
        table.add_row("memory", Text("; ".join(changes) or f"released: {', '.join(released)}"))
    if status.router and status.router.url:
        table.add_row("url", Text(status.router.url))
    return table


def _conditions(conditions: Iterable[Condition], generation: int, headline: str, now: datetime) -> RenderableType:
    table = plain_table("CONDITION", "STATUS", "SINCE", "REASON", "MESSAGE", right=("SINCE",))
    for one in conditions:
        old = one.observed_generation < generation
        good = (one.status == "True") != (one.type in _BAD_WHEN_TRUE)
        style = "dim" if old or one.type in _NEUTRAL else "green" if good else "red"
        # A condition that is well has little to say, and the headline is not said twice.
        message = "" if (good and one.type not in _NEUTRAL) or one.message in headline else one.message
        table.add_row(
            Text(one.type),
            Text(f"{one.status}{' (old)' if old else ''}", style=style),
            age(one.last_transition_time, now),
            Text(one.reason),
            Text(message),
        )
    return table


def _engines(engines: Sequence[EngineStatus], all_of_them: bool) -> list[RenderableType]:
    """Long lists: those in trouble first, the rest as a count."""
    shown = list(engines)
    if len(engines) > ENGINES_SHOWN and not all_of_them:
        shown = sorted(engines, key=lambda engine: engine_state(engine) == "routable")[:ENGINES_SHOWN]
    table = plain_table("ENGINE", "STATE", "VERSION", "RESTARTS", "MESSAGE", right=("RESTARTS",))
    for engine in shown:
        state = engine_state(engine)
        table.add_row(
            Text(engine.name),
            Text(state, style=_STATE_STYLES.get(state, "red")),
            Text(engine.weight_version),
            str(engine.restarts),
            Text(engine.message or (f"released: {', '.join(engine.released)}" if engine.released else "")),
        )
    hidden = len(engines) - len(shown)
    more: list[RenderableType] = [Text(f"... and {hidden} more engines (--all shows them)")] if hidden else []
    return [table, *more]


def _operations(one: FleetReport, now: datetime) -> Iterable[RenderableType]:
    status = one.status
    if (check := status.last_weight_check) is not None:
        bad = f" on {', '.join(check.mismatched_engines)}" if check.mismatched_engines else ""
        yield _operation(f"check {check.action}", check.request_id, f"{check.result or 'waiting'}{bad}",
                         check.completion_time, check.message, now)  # fmt: skip
    requests = {"profile": status.last_profile, "flush": status.last_flush_cache, "abort": status.last_abort_requests}
    for what, made in requests.items():
        if made is not None:
            result = made.result or "waiting"
            yield _operation(what, made.request_id, result, made.completion_time, made.message, now)
    if (restart := status.last_restart) is not None:
        word = (
            "Completed" if restart.completion_time else f"{restart.restarted} of {one.wanted.replicas} engines are back"
        )
        yield _operation("restart", restart.request_id, word, restart.completion_time, "", now)


def _operation(what: str, request: str, result: str, ended: str | None, message: str, now: datetime) -> Text:
    when = f" {age(ended, now)} ago" if ended else ""
    return Text.assemble((f"last {what}", "dim"), f" {request}: {result}{when}" + (f": {message}" if message else ""))
