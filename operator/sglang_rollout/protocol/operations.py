"""One-shot operations on an engine: asked for by an id, done once for each engine process, and then only reported."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class OperationKind(StrEnum):
    """The checks are SGLang's /weights_checker actions; PROFILE is /start_profile with num_steps, FLUSH is /flush_cache
    until the engine is free for it, ABORT is /abort_request of all that it has."""

    SNAPSHOT = "Snapshot"
    RESET = "Reset"
    COMPARE = "Compare"
    CHECKSUM = "Checksum"
    PROFILE = "Profile"
    FLUSH = "Flush"
    ABORT = "Abort"


CHECKS = frozenset({OperationKind.SNAPSHOT, OperationKind.RESET, OperationKind.COMPARE, OperationKind.CHECKSUM})


@dataclass(frozen=True)
class Operation:
    """id: unique over kinds. steps: of a profile. An agent that has begun or done `id` does not do it again.

    start_id: only this engine process is meant, any other is left alone; empty: whichever there is.
    """

    id: str
    kind: OperationKind
    steps: int = 0
    timeout_seconds: float = 300.0
    start_id: str = ""


class OperationResult(StrEnum):
    RUNNING = "Running"
    PASSED = "Passed"
    MISMATCH = "Mismatch"
    UNSUPPORTED = "Unsupported"  # this engine cannot (compare on CPU): the message says why
    ERROR = "Error"


@dataclass(frozen=True)
class OperationReport:
    """tensors: names of the first tensors that differ; differing: how many differ in all.
    checksum: of the whole engine, for CHECKSUM; sharding: of which layout, so that only equal ones are compared.
    weight_version: label of the weights it was done on."""

    id: str
    result: OperationResult = OperationResult.RUNNING
    message: str = ""
    tensors: list[str] = field(default_factory=list)
    differing: int = 0
    checksum: str = ""
    sharding: str = ""
    weight_version: str = ""
