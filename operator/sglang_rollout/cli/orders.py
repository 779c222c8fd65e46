"""A verb that changes a fleet: patch the resource, wait for what the operator says, answer."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from ..api.schema import ApiModel
from ..kube_access.failures import Failure
from .durations import duration_text
from .exits import ExitCode, TimedOut
from .fleet_report import FleetReport, parse, report
from .goals import Asked, Goal, Progress
from .invocation import Invocation
from .patches import Patch, leaves
from .progress_screen import ProgressScreen


@dataclass(frozen=True)
class Deadline:
    """A moment of the monotonic clock, in seconds."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        return cls(time.monotonic() + seconds)

    def left(self) -> float:
        return max(0.0, self.at - time.monotonic())


class Answer(ApiModel):
    """-o json of the verbs that change or wait. outcome: Done, Failed, TimedOut, or Accepted (--no-wait).
    patch: what was sent as spec; generation: of the resource with it; fleet: as it was seen last."""

    verb: str
    namespace: str
    name: str
    outcome: str
    message: str
    exit_code: int
    generation: int
    patch: dict[str, Any] = Field(default_factory=dict)
    seconds: float
    fleet: FleetReport


@dataclass(frozen=True)
class Waiting:
    wait: bool
    timeout: float


def order(invocation: Invocation, name: str, patch: Patch, reached: Goal, waiting: Waiting) -> None:
    """Send `patch` and wait until it is `reached`. Raises Failure; exits with the code of the outcome."""
    deadline = Deadline.after(waiting.timeout)
    changed = invocation.cluster.patch(name, patch)
    generation = int(changed["metadata"]["generation"])
    if not waiting.wait:
        rollout = parse(changed)
        listed = ", ".join(f"{path}={value}" for path, value in leaves(patch))
        message = f"asked for {listed}; generation {generation}, not waiting"
        _answer(invocation, report(rollout), "Accepted", message, generation, patch, 0.0)
        return
    await_goal(invocation, name, Asked(generation, patch, reached), deadline, waiting.timeout)


def await_goal(invocation: Invocation, name: str, goal: Asked, deadline: Deadline, timeout: float) -> None:
    """Follow the fleet until the goal says Done or Failed, or the deadline has passed; then answer and end."""
    progress = Progress("Waiting", "the API server has not answered yet")
    seen: FleetReport | None = None
    with ProgressScreen(invocation.err, f"{invocation.verb} {name}") as screen:
        for current in invocation.cluster.follow(name, deadline.left, screen.tell):
            rollout = parse(current)
            progress, seen = goal(rollout), report(rollout)
            if progress.state != "Waiting":
                break
            screen.show(progress)
    seconds = timeout - deadline.left()
    if seen is None:
        raise TimedOut(f"{name}: no answer from the API server within {duration_text(timeout)}")
    outcome = "TimedOut" if progress.state == "Waiting" else progress.state
    message = progress.message
    if outcome == "TimedOut":
        message = f"not there after {duration_text(timeout)} (what was asked for stands): {message}"
    _answer(invocation, seen, outcome, message, goal.generation, dict(goal.patch), seconds)


_CODES = {"Done": ExitCode.OK, "Accepted": ExitCode.OK, "Failed": ExitCode.FAILED, "TimedOut": ExitCode.TIMED_OUT}


def _answer(
    invocation: Invocation,
    seen: FleetReport,
    outcome: str,
    message: str,
    generation: int,
    patch: Patch,
    seconds: float,
) -> None:
    code = _CODES[outcome]
    if invocation.json_output:
        answer = Answer(
            verb=invocation.verb,
            namespace=seen.namespace,
            name=seen.name,
            outcome=outcome,
            message=message,
            exit_code=int(code),
            generation=generation,
            patch=patch,
            seconds=round(seconds, 3),
            fleet=seen,
        )
        invocation.print_json(answer.to_object())
        if code is not ExitCode.OK:
            raise SystemExit(int(code))
        return
    if code is ExitCode.OK:
        took = f" in {duration_text(seconds)}" if outcome == "Done" else ""
        invocation.out.print(f"{seen.name}: {message}{took}", markup=False, highlight=False, soft_wrap=True)
        return
    raise (TimedOut if code is ExitCode.TIMED_OUT else Failure)(f"{seen.name}: {message}")
