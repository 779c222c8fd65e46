"""Why something does not come up, in one sentence that names the pod, the container and the line that matters."""

from __future__ import annotations

from collections.abc import Iterable

from ..api.names import CONTAINER_ENGINE
from .engines import EngineView
from .observed import ContainerView, Observed, PodView

# Waiting reasons that time alone does not cure.
STUCK_REASONS = frozenset(
    {
        "CreateContainerConfigError",
        "CreateContainerError",
        "ErrImageNeverPull",
        "ErrImagePull",
        "ImageInspectError",
        "ImagePullBackOff",
        "InvalidImageName",
        "RunContainerError",
    }
)


def engine_problem(engine: EngineView) -> str:
    """What keeps this engine from serving; empty when nothing is known to be wrong."""
    for rank in sorted(engine.pods):
        if problem := pod_problem(engine.pods[rank]):
            return problem
        report = engine.reports.get(rank)
        if report and report.engine.failure and not engine.serving:
            return f"pod {engine.pods[rank].name}, container engine: {report.engine.failure}"
        if report and report.probe_failure:
            return f"pod {engine.pods[rank].name}, container engine: {report.probe_failure}"
    if engine.silent:
        return engine.silent[0]
    if engine.statefulset is not None and engine.statefulset.failure:
        return f"StatefulSet {engine.name} cannot create pods: {engine.statefulset.failure}"
    return ""


def stranded(engine: EngineView, version: str) -> str:
    """Of an engine that cannot come to the version that the fleet serves."""
    return (
        f"engine {engine.name} holds version {engine.version}, and nobody has version {version} any more: let the"
        " trainer publish its weights again under another label, or name a checkpoint in weights.source"
    )


def pod_problem(pod: PodView) -> str:
    """What keeps this pod from running; empty when nothing is known to be wrong."""
    if pod.unschedulable:
        return f"pod {pod.name} cannot be scheduled: {pod.unschedulable}"
    for container in pod.containers:
        if problem := _container_problem(container):
            return f"pod {pod.name}, container {container.name}: {problem}"
    return ""


def _container_problem(container: ContainerView) -> str:
    if container.waiting in STUCK_REASONS:
        return f"{container.waiting}: {container.waiting_message or 'see kubectl describe pod'}"
    if container.name == CONTAINER_ENGINE and container.exit_code == 0:
        return ""  # only an engine that was told to end ends so: the kubelet starts it again, maybe after a while
    failed = container.exit_code not in (None, 0)
    if container.waiting == "CrashLoopBackOff" or (failed and not container.running):
        said = container.exit_message.strip().splitlines()
        why = said[-1] if said else container.exit_reason or container.waiting_message or "no message"
        return f"exited with code {container.exit_code}: {why}"
    return ""


def children_problems(observed: Observed) -> list[str]:
    """Children that cannot be made: refused by the API server, or the name is taken by somebody else's object."""
    uid = observed.rollout.metadata.uid
    foreign = [
        f"{kind} {name} belongs to another owner: delete or rename it, the fleet needs that name"
        for (kind, name), child in sorted(observed.children.items())
        if child.owner_uid != uid
    ]
    refused = [f"{kind} {name}: {error}" for (kind, name), error in sorted(observed.apply_errors.items())]
    return [*foreign, *refused]


def router_problems(pods: Iterable[PodView]) -> list[str]:
    return [problem for pod in pods if pod.alive and (problem := pod_problem(pod))]
