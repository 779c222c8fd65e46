"""What `status` says of a fleet, as data: the shape of `-o json`, and what the tables are drawn from."""

from __future__ import annotations

from typing import Any

from pydantic import Field, ValidationError

from ..api import Condition, ConditionType, SGLangRollout, Status, find_condition
from ..api.schema import ApiModel
from ..kube_access.failures import Failure


class Wanted(ApiModel):
    """What spec asks for."""

    replicas: int
    execution_state: str
    pause_mode: str
    memory: dict[str, str]
    weights_version: str | None = None
    weights_path: str | None = None
    control: str


class FleetReport(ApiModel):
    """A fleet. answered: whether status is of the present spec; ready: whether, moreover, the fleet is as spec asks;
    reason and message: of the condition Ready. status: the resource's own, as docs/api.md has it."""

    namespace: str
    name: str
    created: str = ""
    generation: int = 0
    answered: bool = False
    ready: bool = False
    reason: str = ""
    message: str = ""
    wanted: Wanted
    status: Status = Field(default=Status())


def parse(value: dict[str, Any]) -> SGLangRollout:
    """The models of an object from the API server. Raises Failure when they do not fit it."""
    try:
        return SGLangRollout.from_object(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        name = value.get("metadata", {}).get("name", "?")
        raise Failure(
            f"{name} has fields that this plug-in cannot read ({where}: {first['msg']}): use the release of the plug-in"
            " that belongs to the operator"
        ) from error


def report(rollout: SGLangRollout) -> FleetReport:
    """Pure: the report of a fleet as it was read."""
    spec, status, metadata = rollout.spec, rollout.status, rollout.metadata
    source = spec.weights.source
    condition = find_condition(status.conditions, ConditionType.READY)
    answered = status.observed_generation >= metadata.generation
    return FleetReport(
        namespace=metadata.namespace,
        name=metadata.name,
        created=metadata.creation_timestamp,
        generation=metadata.generation,
        answered=answered,
        ready=answered and _holds(condition, metadata.generation),
        reason=condition.reason if condition else "",
        message=_message(condition, answered),
        wanted=Wanted(
            replicas=spec.replicas,
            execution_state=spec.execution.state,
            pause_mode=spec.execution.pause_mode,
            memory={
                "weights": spec.memory.weights,
                "kvCache": spec.memory.kv_cache,
                "cudaGraph": spec.memory.cuda_graph,
            },
            weights_version=spec.weights.version,
            weights_path=source.disk.path if source and source.disk else None,
            control=spec.control,
        ),
        status=status,
    )


def _holds(condition: Condition | None, generation: int) -> bool:
    return condition is not None and condition.status == "True" and condition.observed_generation >= generation


def _message(condition: Condition | None, answered: bool) -> str:
    if condition is None:
        return "the operator has not looked at this fleet yet: is it running?"
    if not answered:
        return f"the operator has not answered the last change yet; before it: {condition.message}"
    return condition.message
