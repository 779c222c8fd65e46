"""spec.engine: one SGLang server over one or more pods."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, WithJsonSchema

from .kubernetes_types import EnvVar, ResourceRequirements
from .overlay import PodOverlay
from .owned_flags import ENGINE_FLAGS
from .schema import ApiModel, Quantity, Rule, list_type

ENGINE_ARGUMENT_RULE = ENGINE_FLAGS.rule("engine-args-owned")
EngineArgument = Annotated[
    str,
    WithJsonSchema(
        {"type": "string", "maxLength": 4096, "x-kubernetes-validations": [ENGINE_ARGUMENT_RULE.to_object()]}
    ),
]


class Engine(ApiModel):
    """How one engine (one SGLang server) runs."""

    image: str = Field(min_length=1, max_length=1024, description="Image with SGLang, e.g. lmsysorg/sglang:v0.5.23.")
    nodes: int = Field(default=1, ge=1, le=256, description="Pods of one engine. Cannot be changed.")
    tensor_parallel_size: int = Field(default=1, ge=1, le=4096, description="Tensor-parallel ranks (--tp-size).")
    pipeline_parallel_size: int = Field(default=1, ge=1, le=256, description="Pipeline stages (--pp-size).")
    data_parallel_size: int = Field(
        default=1, ge=1, le=4096, description="Data-parallel groups (--dp-size); above 1 only with DP attention."
    )
    expert_parallel_size: int = Field(default=1, ge=1, le=4096, description="Expert-parallel ranks (--ep-size).")
    args: tuple[EngineArgument, ...] = Field(
        default=(),
        max_length=128,
        json_schema_extra=list_type("atomic"),
        description="More SGLang flags, in full, except those that the operator sets.",
    )
    env: tuple[EnvVar, ...] = Field(
        default=(),
        max_length=128,
        json_schema_extra=list_type("map", "name"),
        description="Environment of the engine's container.",
    )
    resources: ResourceRequirements = Field(
        default=ResourceRequirements(), description="Resources of the engine's container in each pod."
    )
    shared_memory_size: Quantity = Field(default="16Gi", description="Size of /dev/shm in each pod.")
    startup_timeout_seconds: int = Field(
        default=1800,
        ge=10,
        le=86400,
        description="An engine that does not serve this long after its start is restarted.",
    )
    template: PodOverlay = Field(default=PodOverlay(), description="Laid over the engine's pod template.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "nodes-immutable",
            "self.nodes == oldSelf.nodes",
            "engine.nodes cannot be changed: create a new SGLangRollout with the new number of nodes",
        ),
        Rule(
            "ranks-divide-over-nodes",
            "(self.tensorParallelSize * self.pipelineParallelSize) % self.nodes == 0",
            "engine.tensorParallelSize * engine.pipelineParallelSize must be a multiple of engine.nodes:"
            " every pod runs the same number of ranks",
        ),
        Rule(
            "data-parallel-attention",
            "self.dataParallelSize == 1 || self.args.exists(a, a == '--enable-dp-attention')",
            "engine.dataParallelSize above 1 needs DP attention (SGLang updates weights in place only with it):"
            " add --enable-dp-attention to engine.args",
        ),
        Rule(
            "data-parallel-divides",
            "self.tensorParallelSize % self.dataParallelSize == 0",
            "engine.tensorParallelSize must be a multiple of engine.dataParallelSize: DP attention splits the"
            " tensor-parallel ranks into that many groups",
        ),
    )
