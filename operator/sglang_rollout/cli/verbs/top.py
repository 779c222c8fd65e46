"""top: what the engines do at the moment, from their own metrics."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ...api import EngineStatus, SGLangRollout
from ...api.schema import ApiModel
from ...kube_access.failures import Failure, Unreachable
from ..engine_metrics import EngineLoad, parse_load, total
from ..fleet_report import parse
from ..invocation import Duration, Invocation, fleet_argument, verb
from ..metrics_reader import MetricsReader
from ..tables import engine_state, plain_table

READERS = 16


class EngineRow(ApiModel):
    """load: absent when the engine could not be read; message: why."""

    name: str
    state: str
    weight_version: str
    load: EngineLoad | None = None
    message: str = ""


class TopReport(ApiModel):
    """-o json."""

    namespace: str
    name: str
    engines: tuple[EngineRow, ...]
    total: EngineLoad


@click.command()
@fleet_argument
@click.option("-w", "--watch", is_flag=True, help="Stay, and read again and again.")
@click.option("--interval", type=Duration(), default="2s", show_default=True, help="Between two readings.")
@verb
def top(invocation: Invocation, name: str, watch: bool, interval: float) -> None:
    """Show requests, tokens per second and KV cache use of every engine."""
    reader = MetricsReader(invocation.cluster)
    with ThreadPoolExecutor(READERS) as pool:
        if not watch:
            report, failures = measure(parse(invocation.cluster.rollout(name)), reader, pool)
            _print(invocation, report)
            if failures and len(failures) == len(report.engines):
                raise failures[0]
            return
        with Live(console=invocation.out, auto_refresh=False, transient=True) as live:
            while True:
                report, _ = measure(parse(invocation.cluster.rollout(name)), reader, pool)
                if invocation.json_output:
                    invocation.print_json(report.to_object(), compact=True)
                elif not invocation.out.is_terminal:
                    invocation.out.print(loads_table(report))
                else:
                    live.update(loads_table(report), refresh=True)
                time.sleep(interval)


def measure(
    rollout: SGLangRollout, reader: MetricsReader, pool: ThreadPoolExecutor
) -> tuple[TopReport, Sequence[Failure]]:
    """All engines at once; and why some could not be read."""
    failures: list[Failure] = []

    def row(engine: EngineStatus) -> EngineRow:
        seen = EngineRow(name=engine.name, state=engine_state(engine), weight_version=engine.weight_version)
        try:
            return seen.model_copy(update={"load": parse_load(reader.read(f"{engine.name}-0"))})
        except Failure as failure:
            failures.append(failure)
            return seen.model_copy(update={"message": failure.message})
        except ValueError as error:
            failures.append(Unreachable(f"{engine.name}: /metrics is no Prometheus text: {error}"))
            return seen.model_copy(update={"message": failures[-1].message})

    rows = tuple(pool.map(row, rollout.status.engines))
    report = TopReport(
        namespace=rollout.metadata.namespace,
        name=rollout.metadata.name,
        engines=rows,
        total=total([one.load for one in rows if one.load is not None]),
    )
    return report, failures


def loads_table(report: TopReport) -> RenderableType:
    numbers = ("RUNNING", "QUEUED", "TOKENS/S")
    table = plain_table("ENGINE", "STATE", "VERSION", *numbers, "KV CACHE", "HITS", right=(*numbers, "HITS"))
    for row in report.engines:
        load = row.load or EngineLoad()
        table.add_row(Text(row.name), row.state, Text(row.weight_version), *_cells(load))
    if len(report.engines) > 1:
        table.add_row(Text("all", "bold"), "", "", *_cells(report.total))
    # One sentence for all engines that fail alike.
    messages = dict.fromkeys(row.message for row in report.engines if row.message)
    return Group(table, *(Text(message, "red") for message in messages))


def _cells(load: EngineLoad) -> list[RenderableType]:
    def number(value: float | None, pattern: str) -> str:
        return "-" if value is None else format(value, pattern)

    kv_cache: RenderableType = "-"
    if load.kv_use is not None:
        grid = Table.grid(padding=(0, 1))
        style = "red" if load.kv_use > 0.9 else "green"
        grid.add_row(
            ProgressBar(total=1.0, completed=load.kv_use, width=8, complete_style=style, finished_style=style),
            f"{load.kv_use:4.0%}",
        )
        kv_cache = grid
    return [
        number(load.running, "d"),
        number(load.queued, "d"),
        number(load.tokens_per_second, ",.0f"),
        kv_cache,
        number(load.cache_hit_rate, ".0%"),
    ]


def _print(invocation: Invocation, report: TopReport) -> None:
    if invocation.json_output:
        invocation.print_json(report.to_object())
    elif report.engines:
        invocation.out.print(loads_table(report))
    else:
        invocation.say(f"{report.name} has no engines")
