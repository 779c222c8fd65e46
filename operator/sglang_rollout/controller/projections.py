"""The small part of pods and children that the operator keeps of each object."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime

from ..api import names
from ..transitions.observed import ChildView, ContainerView, PodView
from ..transitions.planned import ANNOTATION_SPEC_HASH
from .kinds import Object

OUR_PREFIX = "rollout.sglang.io/"


def fleet_of(value: Object) -> tuple[str, str] | None:
    """(namespace, name) of the resource that an object belongs to by its label; None: to none."""
    metadata = value["metadata"]
    fleet = (metadata.get("labels") or {}).get(names.LABEL_FLEET)
    return (metadata.get("namespace", ""), fleet) if fleet else None


def pod_view(value: Object) -> PodView | None:
    """None for a pod whose labels are not ours to understand."""
    metadata, status = value["metadata"], value.get("status") or {}
    labels = metadata.get("labels") or {}
    engine, rank = labels.get(names.LABEL_ENGINE), labels.get(names.LABEL_RANK, "0")
    if (engine is not None and not engine.isdigit()) or not rank.isdigit():
        return None
    conditions = {condition["type"]: condition for condition in status.get("conditions") or []}
    scheduled = conditions.get("PodScheduled", {})
    return PodView(
        name=metadata["name"],
        uid=metadata["uid"],
        engine=None if engine is None else int(engine),
        rank=int(rank),
        ip=status.get("podIP", ""),
        node=(value.get("spec") or {}).get("nodeName", ""),
        phase=status.get("phase", "Pending"),
        ready=conditions.get("Ready", {}).get("status") == "True",
        terminating="deletionTimestamp" in metadata,
        gone_by=datetime.fromisoformat(metadata["deletionTimestamp"]) if "deletionTimestamp" in metadata else None,
        created=datetime.fromisoformat(metadata["creationTimestamp"]),
        spec_hash=(metadata.get("annotations") or {}).get(ANNOTATION_SPEC_HASH, ""),
        unschedulable=scheduled.get("message", "") if scheduled.get("status") == "False" else "",
        containers=tuple(
            _container_view(container)
            for group in ("initContainerStatuses", "containerStatuses")
            for container in status.get(group) or []
        ),
    )


def _container_view(status: Object) -> ContainerView:
    state, last = status.get("state") or {}, status.get("lastState") or {}
    waiting = state.get("waiting") or {}
    ended = state.get("terminated") or last.get("terminated") or {}
    return ContainerView(
        name=status["name"],
        running="running" in state,
        ready=bool(status.get("ready")),
        restarts=int(status.get("restartCount") or 0),
        waiting=waiting.get("reason", ""),
        waiting_message=waiting.get("message", ""),
        exit_code=ended.get("exitCode"),
        exit_reason=ended.get("reason", ""),
        exit_message=ended.get("message", ""),
    )


@dataclass(frozen=True)
class Child:
    """A child of a fleet. applied_hash: of the manifest that made it so. drift: changes when anything that an apply
    would set may have been changed. short_of_pods: it has made fewer pods than it should."""

    view: ChildView
    applied_hash: str
    drift: str
    short_of_pods: bool = False


def child(value: Object) -> Child:
    metadata = value["metadata"]
    annotations = metadata.get("annotations") or {}
    spec, status = value.get("spec") or {}, value.get("status") or {}
    owners = [owner for owner in metadata.get("ownerReferences") or [] if owner.get("controller")]
    return Child(
        view=ChildView(
            kind=value["kind"],
            name=metadata["name"],
            uid=metadata["uid"],
            owner_uid=owners[0]["uid"] if owners else "",
            terminating="deletionTimestamp" in metadata,
            annotations={name: text for name, text in annotations.items() if name.startswith(OUR_PREFIX)},
            failure=_replica_failure(status),
        ),
        applied_hash=annotations.get(names.ANNOTATION_APPLIED_HASH, ""),
        drift=drift_mark(value),
        short_of_pods=value["kind"] == "StatefulSet"
        and int(status.get("replicas") or 0) < int(spec.get("replicas", 1)),
    )


def drift_mark(value: Object) -> str:
    """Equal as long as nobody can have changed what an apply sets. Kinds without a generation are told by their
    resourceVersion; metadata does not move the generation, so it is in the mark itself."""
    metadata = value["metadata"]
    annotations = metadata.get("annotations") or {}
    return json.dumps(
        [
            metadata.get("generation") or metadata.get("resourceVersion"),
            metadata.get("labels") or {},
            metadata.get("ownerReferences") or [],
            {name: text for name, text in annotations.items() if name.startswith(OUR_PREFIX)},
        ],
        sort_keys=True,
    )


def _replica_failure(status: Object) -> str:
    for condition in status.get("conditions") or []:
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            return str(condition.get("message") or condition.get("reason") or "ReplicaFailure")
    return ""


@dataclass(frozen=True)
class CreateFailure:
    """A StatefulSet's event that it could not create a pod."""

    statefulset_uid: str
    message: str
    seen: str


def create_failure(value: Object) -> CreateFailure:
    """From a core/v1 Event with reason FailedCreate."""
    series = value.get("series") or {}
    seen = series.get("lastObservedTime") or value.get("lastTimestamp") or value.get("eventTime") or ""
    return CreateFailure(value["involvedObject"].get("uid", ""), value.get("message") or "", seen)


def failed_object(value: Object) -> tuple[str, str] | None:
    """(namespace, name) of what a core/v1 Event is about."""
    about = value["involvedObject"]
    return (about.get("namespace", ""), about.get("name", ""))
