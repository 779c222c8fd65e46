"""spec.execution: whether the fleet generates."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .schema import ApiModel

PauseModeName = Literal["Abort", "Retract", "InPlace"]


class Execution(ApiModel):
    """Whether the engines generate."""

    state: Literal["Running", "Paused"] = Field(
        default="Running", description="Running: engines generate. Paused: requests wait at the engines."
    )
    pause_mode: PauseModeName = Field(
        default="Retract",
        description="Abort: running requests end. Retract: they wait and recompute their KV cache."
        " InPlace: they freeze with it.",
    )
