"""What a report must be like to be believed. Pods run images of tenants: an odd one is told as such and left alone, it
must not keep its fleet from being planned."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..protocol.report import AgentReport, MoveReport
from ..protocol.routing import RouterReport

LABEL_MAX = 128  # characters of what goes into the status as it is
TEXT_MAX = 65_536
NUMBER_MAX = 2**31
BYTES_MAX = 2**50
LIST_MAX = 1024
STAGED_MAX = 8  # versions that an agent can say it holds


def agent_problem(report: AgentReport) -> str:
    """Why this report cannot be believed, in a few words; empty: it can."""
    return next(_agent_problems(report), "")


def router_problem(report: RouterReport) -> str:
    """The same of a router's report."""
    if len(report.registered) > LIST_MAX * 4:
        return f"{len(report.registered)} workers"
    return "" if 0 <= report.lease_term < NUMBER_MAX else f"lease term {report.lease_term}"


def _agent_problems(report: AgentReport) -> Iterator[str]:
    engine = report.engine
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
    for move in filter(None, (report.move, report.prepare)):
        texts += [move.id, move.error]
        yield from _move_problems(move)
    if len(report.stage.held) > STAGED_MAX:
        yield f"{len(report.stage.held)} versions in its stage"
    if any(len(text) > LABEL_MAX for held in report.stage.held for text in (held.version, held.root)):
        yield f"a staged version longer than {LABEL_MAX} characters"
    texts += [report.stage.problem, engine.weights_root]
    if any(len(text) > TEXT_MAX for text in texts):
        yield f"a text longer than {TEXT_MAX} characters"


def _move_problems(move: MoveReport) -> Iterator[str]:
    if not (math.isfinite(move.stall_seconds) and 0 <= move.stall_seconds < NUMBER_MAX):
        yield f"a stall of {move.stall_seconds} s"
    if len(move.root) > LABEL_MAX:
        yield f"a digest longer than {LABEL_MAX} characters"
    numbers = (move.staged_bytes, move.of_bytes, move.nonfinite)
    yield from (f"{number} bytes or values" for number in numbers if not 0 <= number < BYTES_MAX)
