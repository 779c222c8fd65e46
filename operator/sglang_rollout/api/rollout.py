"""The resource as a whole, and the rules that span its parts."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from .agent import Agent
from .cel import is_default
from .engine import Engine
from .execution import Execution
from .group import API_VERSION, KIND
from .memory import Memory
from .model import Model
from .network import Network
from .operations import AbortRequests, FlushCache, Profile, Restart, WeightCheck
from .recovery import RestartPolicy
from .router import Router
from .scheduling import Scheduling
from .schema import ApiModel, Rule
from .status import Status
from .weights import Staleness, Weights

NAME_MAX = 40


class Spec(ApiModel):
    """The fleet that is wanted."""

    replicas: int = Field(default=1, ge=0, le=1000, description="Engines, not pods.")
    model: Model = Field(description="The model that the engines start with.")
    engine: Engine = Field(description="How one engine runs.")
    agent: Agent = Field(default=Agent(), description="The sidecar beside every engine pod.")
    router: Router = Field(default=Router(), description="What spreads requests over the routable engines.")
    execution: Execution = Field(default=Execution(), description="Whether the engines generate.")
    memory: Memory = Field(default=Memory(), description="What the engines keep in GPU memory.")
    weights: Weights = Field(default=Weights(), description="Which weights the fleet serves.")
    staleness: Staleness = Field(default=Staleness(), description="How far behind an engine may serve.")
    weight_check: WeightCheck | None = Field(default=None, description="Ask every engine to check its weights, once.")
    profile: Profile | None = Field(default=None, description="Ask every engine to profile itself, once.")
    flush_cache: FlushCache | None = Field(default=None, description="Ask every engine to flush its KV cache, once.")
    abort_requests: AbortRequests | None = Field(
        default=None, description="Ask every engine to abort all of its requests, once."
    )
    restart: Restart | None = Field(default=None, description="Restart all engines, once.")
    restart_policy: RestartPolicy = Field(default=RestartPolicy(), description="How a broken engine comes back.")
    scheduling: Scheduling = Field(default=Scheduling(), description="Where the engines' pods go.")
    network: Network = Field(default=Network(), description="How the engines' pods are reached.")
    control: Literal["Operator", "External"] = Field(
        default="Operator",
        description="Operator: engines follow this spec. External: a trainer drives them itself;"
        " the operator restarts, gates and observes.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "running-is-resident",
            "self.execution.state != 'Running' || (self.memory.weights == 'Resident'"
            " && self.memory.kvCache == 'Resident' && self.memory.cudaGraph == 'Resident')",
            "execution.state Running needs all of memory Resident: set execution.state Paused to release memory",
        ),
        Rule(
            "released-weights-come-back",
            "self.memory.weights == 'Resident' || self.memory.weightsBackup == 'HostMemory'"
            " || has(self.weights.source)",
            "memory.weights Released needs a way back: set memory.weightsBackup HostMemory or a weights.source",
        ),
        Rule(
            "pipeline-not-paused",
            "self.engine.pipelineParallelSize == 1 || self.execution.state == 'Running'",
            "SGLang's pipeline loop ignores pause: engine.pipelineParallelSize above 1 needs execution.state Running",
        ),
        Rule(
            "pipeline-not-released",
            "self.engine.pipelineParallelSize == 1 || (self.memory.weights == 'Resident'"
            " && self.memory.kvCache == 'Resident' && self.memory.cudaGraph == 'Resident')",
            "SGLang's pipeline loop ignores pause: engine.pipelineParallelSize above 1 needs all of memory Resident",
        ),
        Rule(
            "pipeline-moves-by-disk",
            "self.engine.pipelineParallelSize == 1"
            " || ((!has(self.weights.source) || self.weights.source.type == 'Disk') && !has(self.weights.prepare))",
            "engine.pipelineParallelSize above 1 moves weights by new engines on a new path: use weights.source.type"
            " Disk and no weights.prepare",
        ),
        Rule(
            "staged-needs-stage",
            "self.agent.staging.medium != 'None' || (!has(self.weights.prepare) && (!has(self.weights.source)"
            " || !has(self.weights.source.distributed)"
            " || self.weights.source.distributed.transfer == 'Direct'))",
            "agent.staging.medium None stages nothing: remove weights.prepare and use distributed.transfer Direct, or"
            " set agent.staging.medium to Host",
        ),
        Rule(
            "rolling-needs-lag",
            "self.weights.updateStrategy.type != 'Rolling' || self.staleness.maxVersionLag >= 1",
            "weights.updateStrategy.type Rolling serves two versions for a while: set staleness.maxVersionLag to 1"
            " or more, or use AllAtOnce",
        ),
        Rule(
            "boot-version-names-its-path",
            "self.control == 'External' || has(self.weights.source) || has(oldSelf.weights.source)"
            " || self.model.path == oldSelf.model.path || (has(self.weights.version)"
            " && (!has(oldSelf.weights.version) || self.weights.version != oldSelf.weights.version))",
            "a version means one set of bytes: change weights.version together with model.path"
            " (or move to the new checkpoint with weights.source)",
        ),
        Rule(
            "external-control-execution",
            f"self.control != 'External' || ({is_default(Execution(), 'self.execution')})",
            "under control External the trainer pauses the engines itself: remove execution",
        ),
        Rule(
            "external-control-memory",
            f"self.control != 'External' || ({is_default(Memory(), 'self.memory')})",
            "under control External the trainer releases memory itself: remove memory",
        ),
        Rule(
            "external-control-weights",
            f"self.control != 'External' || ({is_default(Weights(), 'self.weights')})",
            "under control External the trainer moves the weights itself: remove weights",
        ),
    )


class Metadata(ApiModel):
    """What the operator reads of the object's metadata (meta/v1 ObjectMeta)."""

    name: str
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    creation_timestamp: str = ""
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)


class SGLangRollout(ApiModel):
    """A fleet of SGLang engines that serve reinforcement-learning rollouts: engines, a router in front of them, and
    the weights that they serve. No request is served by weights of a version that is not allowed."""

    api_version: str = API_VERSION
    kind: str = KIND
    metadata: Metadata
    spec: Spec
    status: Status = Field(default=Status())

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "name-length",
            f"size(self.metadata.name) <= {NAME_MAX}",
            f"metadata.name must have at most {NAME_MAX} characters: the names of pods and Services derive from it",
        ),
        Rule(
            "name-dns-1035",
            "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
            "metadata.name must start with a letter and hold only a-z, 0-9 and '-' (no dots): the names of Services"
            " derive from it; e.g. qwen3-8b",
        ),
    )

    @classmethod
    def from_object(cls, value: dict[str, Any]) -> SGLangRollout:
        """From the object as the API server sends it; fields that this operator does not know are ignored.
        Raises pydantic.ValidationError, whose text names each wrong field."""
        return cls.model_validate(value)
