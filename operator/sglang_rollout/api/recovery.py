"""spec.restartPolicy: how a broken engine comes back."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from .schema import ApiModel, Rule


class RestartPolicy(ApiModel):
    """What happens when a pod of an engine is lost or its container restarts."""

    type: Literal["RecreateGroup", "None"] = Field(
        default="RecreateGroup",
        description="RecreateGroup: all pods of the engine anew, together. None: leave it to you.",
    )
    base_delay_seconds: int = Field(default=30, ge=0, le=86400, description="Wait before the second restart; doubles.")
    max_delay_seconds: int = Field(default=600, ge=0, le=86400, description="The longest wait.")
    max_restarts: int = Field(
        default=10, ge=0, le=1000000, description="Restarts before the pods are kept for debugging."
    )
    reset_after_seconds: int = Field(
        default=3600, ge=1, le=31536000, description="An engine that was well this long starts counting again."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "restart-delays",
            "self.baseDelaySeconds <= self.maxDelaySeconds",
            "restartPolicy.baseDelaySeconds must not be above restartPolicy.maxDelaySeconds",
        ),
    )
