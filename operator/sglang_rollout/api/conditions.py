"""Conditions of the resource: their types, and a pure builder that keeps transition times."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from enum import StrEnum
from typing import Literal

from pydantic import Field

from .schema import ApiModel, Timestamp

MESSAGE_MAX = 2048
ConditionStatus = Literal["True", "False", "Unknown"]


class ConditionType(StrEnum):
    READY = "Ready"  # the summary: the fleet is what spec asks for, paused fleets included
    AVAILABLE = "Available"  # at least one engine is routable
    PROGRESSING = "Progressing"
    DEGRADED = "Degraded"
    PAUSED = "Paused"
    WEIGHTS_CONSISTENT = "WeightsConsistent"
    ROUTER_SYNCED = "RouterSynced"
    STALENESS_WITHIN_BOUND = "StalenessWithinBound"


class Condition(ApiModel):
    """One aspect of the fleet's state (meta/v1 Condition)."""

    type: str = Field(min_length=1, max_length=316, description="Which aspect.")
    status: ConditionStatus = Field(description="True, False or Unknown.")
    observed_generation: int = Field(ge=0, description="Generation of the resource that this was seen for.")
    last_transition_time: Timestamp = Field(description="When status last changed.")
    reason: str = Field(
        min_length=1, max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$", description="Why, one word."
    )
    message: str = Field(max_length=32768, description="Why, in a sentence that a person can act on.")


def timestamp(now: datetime) -> str:
    """RFC 3339 in UTC with whole seconds, as Kubernetes writes times. `now` must be aware."""
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_timestamp(value: str) -> datetime:
    """The aware time of an RFC 3339 string."""
    return datetime.fromisoformat(value)


def seconds_left(since: str | None, span: float, now: datetime) -> float:
    """Until `span` seconds after `since` are over, negative after that; all of them when nothing has begun. A time
    that lies more than the span ahead was written by a clock that was wrong: nothing waits for that, it is over."""
    if since is None:
        return span
    left = span - (now - parse_timestamp(since)).total_seconds()
    return left if left <= 2 * span else 0.0


def shorten(message: str, limit: int = MESSAGE_MAX) -> str:
    """At most `limit` characters: the end of a long message gives way."""
    return message if len(message) <= limit else message[: limit - 1] + "…"


def with_condition(
    conditions: Iterable[Condition],
    type_: ConditionType | str,
    status: bool | None,
    reason: str,
    message: str,
    *,
    generation: int,
    now: datetime,
) -> tuple[Condition, ...]:
    """`conditions` with this one set, in its old place or at the end. The transition time changes only when the
    status does. status: None is Unknown."""
    before = tuple(conditions)
    name = str(type_)
    word: ConditionStatus = "Unknown" if status is None else "True" if status else "False"
    old = next((condition for condition in before if condition.type == name), None)
    since = old.last_transition_time if old is not None and old.status == word else timestamp(now)
    new = Condition(
        type=name,
        status=word,
        observed_generation=generation,
        last_transition_time=since,
        reason=reason,
        message=shorten(message),
    )
    if old is None:
        return (*before, new)
    return tuple(new if condition.type == name else condition for condition in before)


def find_condition(conditions: Iterable[Condition], type_: ConditionType | str) -> Condition | None:
    return next((condition for condition in conditions if condition.type == str(type_)), None)
