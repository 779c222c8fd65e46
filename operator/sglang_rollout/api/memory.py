"""spec.memory: what the engines keep in GPU memory."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from .schema import ApiModel, Rule

Residency = Literal["Resident", "Released"]


class Memory(ApiModel):
    """What the engines keep in GPU memory. Released gives it to others, e.g. a trainer on the same GPUs."""

    weights: Residency = Field(default="Resident", description="The model's weights.")
    kv_cache: Residency = Field(default="Resident", description="The KV cache.")
    cuda_graph: Residency = Field(default="Resident", description="Captured CUDA graphs.")
    weights_backup: Literal["None", "HostMemory"] = Field(
        default="None", description="HostMemory: SGLang keeps a copy of released weights in host memory."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "weights-released-last",
            "self.weights == 'Resident' || (self.kvCache == 'Released' && self.cudaGraph == 'Released')",
            "memory.weights Released needs memory.kvCache and memory.cudaGraph Released, too",
        ),
    )
