"""Fields that the API already has but the operator does not act on yet: accepted, and reported, never ignored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .rollout import Spec

REASON = "NotImplemented"


@dataclass(frozen=True)
class UnsupportedField:
    """path: dotted, from `spec`; reason: one sentence."""

    path: str
    reason: str


@dataclass(frozen=True)
class _Row:
    path: str
    is_used: Callable[[Spec], bool]
    reason: str


# One row a gap: the work that closes it deletes the row.
_ROWS: tuple[_Row, ...] = (
    _Row("spec.scheduling.gang", lambda s: s.scheduling.gang.mode != "None", "pods are scheduled one by one"),
    _Row("spec.scheduling.topology", lambda s: s.scheduling.topology.policy != "None", "pods go to any node"),
    _Row("spec.scheduling.queueName", lambda s: s.scheduling.queue_name != "", "pods are not queued"),
)


def unsupported_fields(spec: Spec) -> list[UnsupportedField]:
    """What `spec` asks for and this operator does not do, in the order of the table; empty when all is done."""
    return [UnsupportedField(row.path, row.reason) for row in _ROWS if row.is_used(spec)]


def unsupported_message(fields: list[UnsupportedField]) -> str:
    """A sentence for the condition with reason NotImplemented."""
    listed = "; ".join(f"{field.path} ({field.reason})" for field in fields)
    return f"accepted but not done yet by this version of the operator: {listed}"


def unsupported_paths() -> list[str]:
    """All fields of the table, used or not."""
    return [row.path for row in _ROWS]
