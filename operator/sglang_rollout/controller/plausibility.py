"""What a report must be like to be believed. Pods run images of tenants: an odd one is told as such and left alone, it
must not keep its fleet from being planned."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..protocol.report import AgentReport
from ..protocol.routing import RouterReport

LABEL_MAX = 128  # characters of what goes into the status as it is
TEXT_MAX = 65_536
NUMBER_MAX = 2**31
LIST_MAX = 1024


def agent_problem(report: AgentReport) -> str:
    """Why this report cannot be believed, in a few words; empty: it can."""
    return next(_agent_problems(report), "")


def router_problem(report: RouterReport) -> str:
    """The same of a router's report."""
    if len(report.registered) > LIST_MAX * 4:
        return f"{len(report.registered)} workers"
    return "" if 0 <= report.lease_term < NUMBER_MAX else f"lease term {report.lease_term}"


def _agent_problems(report: AgentReport) -> Iterator[str]:
    engine, move = report.engine, report.move
    labels = {"start id": engine.start_id, "weight version": engine.weight_version, "agent start": report.agent_start}
    yield from (
        f"a {name} longer than {LABEL_MAX} characters" for name, text in labels.items() if len(text) > LABEL_MAX
    )
    numbers = {
        "rank": report.rank,
        "lease term": report.lease_term,
        "generation": report.generation,
        "incarnation": report.incarnation,
    }
    yield from (f"{name} {number}" for name, number in numbers.items() if not 0 <= number < NUMBER_MAX)
    if len(set(engine.released)) != len(engine.released):
        yield "something released twice"
    if len(report.operations) > LIST_MAX or any(not 0 <= one.differing < NUMBER_MAX for one in report.operations):
        yield "operations that nobody asked for"
    texts = [engine.failure, engine.weights_void, engine.data_key, report.probe_failure, report.message]
    texts += [text for one in report.operations for text in (one.message, one.checksum, one.sharding, *one.tensors)]
    if move is not None:
        texts += [move.id, move.error]
        if not (math.isfinite(move.stall_seconds) and 0 <= move.stall_seconds < NUMBER_MAX):
            yield f"a stall of {move.stall_seconds} s"
    if any(len(text) > TEXT_MAX for text in texts):
        yield f"a text longer than {TEXT_MAX} characters"
