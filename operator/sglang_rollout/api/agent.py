"""spec.agent: the sidecar that drives its engine."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from .kubernetes_types import ResourceRequirements
from .schema import ApiModel, Quantity, Rule


class Staging(ApiModel):
    """Where an agent keeps weights that are not served yet."""

    medium: Literal["Host", "Device", "None"] = Field(
        default="Host",
        description="Host: shared memory of the pod. Device: GPU memory. None: nothing is staged, engines read"
        " checkpoints by themselves and take no weights from a trainer but Direct and Colocated ones.",
    )
    versions: int = Field(default=1, ge=1, le=2, description="How many versions of the weights fit.")
    bucket_size: Quantity = Field(
        default="1Gi",
        description="Largest bucket of a trainer's weights that a stage over several GPUs of one pod always has room "
        "for: a bucket lies whole on one of them, so some room is added on each.",
    )


class GpuAccess(ApiModel):
    """How an agent reaches the GPUs of its engine."""

    type: Literal["None", "ResourceClaim", "VisibleDevices"] = Field(
        default="None",
        description="None: not at all. ResourceClaim: a claim that engine.resources.claims and agent.resources.claims"
        " both name. VisibleDevices: all GPUs of the node, for engines that have whole nodes.",
    )


class Agent(ApiModel):
    """The sidecar beside every engine pod."""

    image: str | None = Field(
        default=None,
        max_length=1024,
        description="Image with the agent; absent: the one that the operator was installed with.",
    )
    staging: Staging = Field(default=Staging(), description="Where weights are kept before they are served.")
    gpu_access: GpuAccess = Field(default=GpuAccess(), description="How the agent reaches the engine's GPUs.")
    resources: ResourceRequirements = Field(
        default=ResourceRequirements(), description="Resources of the agent's container."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "device-stage-needs-gpu",
            "self.staging.medium != 'Device' || self.gpuAccess.type != 'None'",
            "agent.staging.medium Device keeps weights in GPU memory: set agent.gpuAccess.type to ResourceClaim or"
            " VisibleDevices",
        ),
        Rule(
            "claim-is-named",
            "self.gpuAccess.type != 'ResourceClaim' || (has(self.resources.claims) && size(self.resources.claims) > 0)",
            "agent.gpuAccess.type ResourceClaim needs agent.resources.claims with the name of the engine's claim",
        ),
    )
