"""What a user may lay over the pods that the operator renders, and what stays the operator's."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from .cel import string_list
from .kubernetes_types import Labels
from .names import CONTAINER_AGENT, CONTAINER_ENGINE, CONTAINER_INJECT, CONTAINER_ROUTER, CONTAINER_SIDECAR
from .schema import ApiModel, Opaque, OpenModel, Rule, list_type

_OWN_CONTAINERS = (
    CONTAINER_ENGINE,
    CONTAINER_AGENT,
    CONTAINER_INJECT,
    CONTAINER_ROUTER,
    CONTAINER_SIDECAR,
)
_OWN_FIELDS = ("image", "command", "args", "ports", "livenessProbe", "readinessProbe", "startupProbe", "lifecycle")


class ContainerOverlay(OpenModel):
    """A container, merged by name into the operator's; a new name is added to the pod (core/v1 Container)."""

    name: str = Field(min_length=1, max_length=63, description="The container's name: engine, router, or one of yours.")
    image: str | None = Field(default=None, max_length=1024, description="Image; only for containers of yours.")
    command: tuple[str, ...] | None = Field(
        default=None,
        json_schema_extra=list_type("atomic"),
        description="Entry point; only for containers of yours.",
    )
    args: tuple[str, ...] | None = Field(
        default=None,
        json_schema_extra=list_type("atomic"),
        description="Arguments; only for containers of yours.",
    )
    ports: tuple[Opaque, ...] | None = Field(
        default=None,
        json_schema_extra=list_type("atomic"),
        description="Ports (core/v1 ContainerPort); only for containers of yours.",
    )
    liveness_probe: Opaque | None = Field(default=None, description="core/v1 Probe; only for containers of yours.")
    readiness_probe: Opaque | None = Field(default=None, description="core/v1 Probe; only for containers of yours.")
    startup_probe: Opaque | None = Field(default=None, description="core/v1 Probe; only for containers of yours.")
    lifecycle: Opaque | None = Field(default=None, description="core/v1 Lifecycle; only for containers of yours.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "overlay-container",
            f"!(self.name in {string_list(_OWN_CONTAINERS)}) || ("
            + " && ".join(f"!has(self.{name})" for name in _OWN_FIELDS)
            + ")",
            "image, command, args, ports, probes and lifecycle of the operator's containers cannot be overlaid:"
            " use engine.image, engine.args, router.image or router.args, or give your container another name",
        ),
    )


class PodSpecOverlay(OpenModel):
    """Fields of core/v1 PodSpec, merged into the operator's: maps by key, lists by name, the rest replaced."""

    containers: tuple[ContainerOverlay, ...] | None = Field(
        default=None,
        max_length=16,
        json_schema_extra=list_type("map", "name"),
        description="Containers, merged by name.",
    )
    init_containers: tuple[ContainerOverlay, ...] | None = Field(
        default=None,
        max_length=16,
        json_schema_extra=list_type("map", "name"),
        description="Init containers and sidecars, merged by name.",
    )
    restart_policy: str | None = Field(
        default=None, max_length=32, description="Not yours to set: pods restart Always."
    )
    hostname: str | None = Field(default=None, max_length=63, description="Not yours to set: the pod's name.")
    subdomain: str | None = Field(default=None, max_length=63, description="Not yours to set: the engine's Service.")
    host_network: bool | None = Field(default=None, description="Not yours to set here: use network.hostNetwork.")
    scheduler_name: str | None = Field(
        default=None, max_length=253, description="Not yours to set here: use scheduling.schedulerName."
    )
    share_process_namespace: bool | None = Field(
        default=None, description="Not yours to set here: it follows from agent.gpuAccess."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "overlay-pod",
            "!has(self.restartPolicy) && !has(self.hostname) && !has(self.subdomain) && !has(self.hostNetwork)"
            " && !has(self.schedulerName) && !has(self.shareProcessNamespace)",
            "the operator sets restartPolicy, hostname, subdomain, hostNetwork, schedulerName and"
            " shareProcessNamespace: remove them; use network.hostNetwork and scheduling.schedulerName",
        ),
    )


class MetadataOverlay(ApiModel):
    """Labels and annotations for the pods."""

    labels: Labels | None = Field(default=None, description="Labels added to the pods.")
    annotations: dict[str, str] | None = Field(
        default=None, max_length=64, description="Annotations added to the pods."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "overlay-labels",
            "!has(self.labels) || self.labels.all(key, !key.startsWith('rollout.sglang.io/')"
            " && !(key in ['app.kubernetes.io/managed-by', 'app.kubernetes.io/name',"
            " 'app.kubernetes.io/component']))",
            "the operator finds its pods by rollout.sglang.io/* and app.kubernetes.io/managed-by, name and"
            " component: choose other label keys",
        ),
    )


class PodOverlay(ApiModel):
    """Laid over the pod template that the operator renders (core/v1 PodTemplateSpec)."""

    metadata: MetadataOverlay | None = Field(default=None, description="Labels and annotations for the pods.")
    spec: PodSpecOverlay | None = Field(
        default=None,
        description="nodeSelector, tolerations, affinity, volumes, containers and others of core/v1 PodSpec.",
    )
