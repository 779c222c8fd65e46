"""spec.scheduling: where the engines' pods go."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from .schema import ApiModel, Rule


class Gang(ApiModel):
    """Whether an engine's pods are scheduled together."""

    mode: Literal["None", "PodGroup"] = Field(
        default="None", description="PodGroup: all pods of an engine or none, by a scheduler that knows pod groups."
    )


class Topology(ApiModel):
    """Which pods of an engine share a part of the cluster."""

    key: str = Field(
        default="", max_length=317, description="Node label that names the part, e.g. a rack or NVLink domain."
    )
    policy: Literal["None", "Pack", "Exclusive"] = Field(
        default="None", description="Pack: an engine's pods in one part. Exclusive: and no other engine in it."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "topology-key",
            "(self.policy == 'None') == (self.key == '')",
            "scheduling.topology needs both key and policy: write a node label as key and Pack or Exclusive as policy",
        ),
    )


class Scheduling(ApiModel):
    """Where the engines' pods go."""

    scheduler_name: str = Field(
        default="", max_length=253, description="Scheduler of the engines' pods; empty: the default."
    )
    queue_name: str = Field(default="", max_length=253, description="Kueue's queue; empty: none.")
    gang: Gang = Field(default=Gang(), description="Whether an engine's pods are scheduled together.")
    topology: Topology = Field(default=Topology(), description="Which pods share a part of the cluster.")
