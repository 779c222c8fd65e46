"""spec.weights and spec.staleness: which weights the fleet serves and how it gets them."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from .cel import same_weights
from .execution import PauseModeName
from .schema import ApiModel, Rule, list_type

# Printable, no space at the ends: the label travels in flags, labels of workers and metrics.
Version = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[!-~]([ -~]*[!-~])?$")]

SourceType = Literal["Disk", "Distributed", "Colocated", "External"]
Transport = Literal["Auto", "NCCL", "Gloo", "PeerCopy"]


class DiskSource(ApiModel):
    """A checkpoint in a folder."""

    path: str = Field(
        max_length=1024,
        pattern=r"^/[^\s].*$",
        description="Folder of the checkpoint inside the engine's container, below model.mountPath for the volume.",
    )


class Sender(ApiModel):
    """A rank of the trainer that sends weights."""

    address: str = Field(min_length=1, max_length=253, description="IP address or DNS name.")
    port: int = Field(ge=1, le=65535, description="Port of the rendezvous.")


class DistributedSource(ApiModel):
    """Weights that a trainer sends over the network."""

    transfer: Literal["Staged", "Direct"] = Field(
        default="Staged", description="Staged: to the agents, beside running generation. Direct: into the engines."
    )
    transport: Transport = Field(
        default="Auto",
        description="How they travel; Auto: the fastest that works here. PeerCopy is CUDA IPC on one node.",
    )
    senders: tuple[Sender, ...] = Field(
        default=(),
        max_length=64,
        json_schema_extra=list_type("atomic"),
        description="Where the trainer's ranks listen.",
    )


class ColocatedSource(ApiModel):
    """Weights that a trainer on the engines' own GPUs hands over."""

    senders: tuple[Sender, ...] = Field(
        min_length=1,
        max_length=1000,
        json_schema_extra=list_type("atomic"),
        description="Where the trainer listens: one for each engine, by its index, or one for all.",
    )


class WeightSource(ApiModel):
    """Where weights come from: a type and, but for External, the member of that name."""

    # Replaced as one: the member that a trainer has set would stay beside another type that somebody applies.
    model_config = ConfigDict(json_schema_extra={"x-kubernetes-map-type": "atomic"})

    type: SourceType = Field(
        description="Disk: a folder. Distributed: a trainer sends them. Colocated: a trainer on the same GPUs."
        " External: somebody else moves them, the version is only read back."
    )
    disk: DiskSource | None = Field(default=None, description="For type Disk.")
    distributed: DistributedSource | None = Field(default=None, description="For type Distributed.")
    colocated: ColocatedSource | None = Field(default=None, description="For type Colocated.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "source-disk",
            "(self.type == 'Disk') == has(self.disk)",
            "type Disk needs disk (disk: {path: ...}), and other types must not have it",
        ),
        Rule(
            "source-distributed",
            "(self.type == 'Distributed') == has(self.distributed)",
            "type Distributed needs distributed (distributed: {senders: [...]}), and other types must not have it",
        ),
        Rule(
            "source-colocated",
            "(self.type == 'Colocated') == has(self.colocated)",
            "type Colocated needs colocated (colocated: {senders: [...]}), and other types must not have it",
        ),
    )


class PreparedWeights(ApiModel):
    """Weights to stage now; they are committed when weights.version becomes theirs."""

    version: Version = Field(description="Label of these weights.")
    source: WeightSource = Field(description="Where they come from.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "prepared-is-staged",
            "self.source.type == 'Disk' || (has(self.source.distributed)"
            " && self.source.distributed.transfer == 'Staged')",
            "weights.prepare stages weights: use a source of type Disk, or Distributed with transfer Staged",
        ),
    )


class UpdateStrategy(ApiModel):
    """In which order engines move to other weights and to another pod template."""

    type: Literal["AllAtOnce", "Rolling"] = Field(
        default="AllAtOnce", description="AllAtOnce: all pause, all move, all continue. Rolling: in waves."
    )
    max_unavailable: int = Field(
        default=1, ge=1, le=1000, description="Engines that may be away at once, in a wave or while pods are replaced."
    )


class Weights(ApiModel):
    """Which weights the fleet serves."""

    version: Version | None = Field(
        default=None,
        description="Label of the weights, any string; absent: what the engines start with from model.path.",
    )
    source: WeightSource | None = Field(default=None, description="Where they come from; absent: model.path.")
    prepare: PreparedWeights | None = Field(default=None, description="The next weights, staged ahead of their commit.")
    update_strategy: UpdateStrategy = Field(default=UpdateStrategy(), description="In which order engines move.")
    pause_mode: PauseModeName = Field(default="Retract", description="How engines are paused for the commit.")
    kv_cache: Literal["Flush", "Keep"] = Field(
        default="Flush", description="Flush: no KV cache computed by other weights is used. Keep: it is."
    )
    verify: Literal["None", "Fast", "Checksum"] = Field(
        default="Fast",
        description="How the moved bytes are checked. Fast: sums on the GPU. Checksum: SGLang's own, takes seconds.",
    )
    failure_policy: Literal["KeepGated", "RestartEngine"] = Field(
        default="RestartEngine",
        description="What becomes of an engine whose move failed; it serves nothing in either case.",
    )
    allow_non_finite: bool = Field(
        default=False,
        description="Take weights with Inf or NaN in them, of which engines die: counted, not refused.",
    )
    timeout_seconds: int = Field(default=300, ge=1, le=86400, description="Deadline of one move of the fleet.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "version-is-a-label",
            "!has(self.version) || self.version != 'default'",
            "weights.version 'default' is what SGLang calls weights that nobody has labelled: choose another",
        ),
        Rule(
            "source-needs-version",
            "!has(self.source) || has(self.version)",
            "weights.source needs weights.version: give the weights from there a label",
        ),
        Rule(
            "in-place-keeps-cache",
            "self.pauseMode != 'InPlace' || self.kvCache != 'Flush'",
            "weights.pauseMode InPlace cannot flush the cache of running requests: use weights.kvCache Keep,"
            " or weights.pauseMode Retract",
        ),
        Rule(
            "version-names-its-source",
            "!has(self.version) || !has(oldSelf.version) || self.version != oldSelf.version"
            " || (has(self.source) == has(oldSelf.source)"
            f" && (!has(self.source) || ({same_weights('self.source', 'oldSelf.source')})))",
            "a version means one set of bytes: change weights.version together with weights.source",
        ),
        Rule(
            "prepared-version-names-its-source",
            "!has(self.prepare) || !has(oldSelf.prepare) || self.prepare.version != oldSelf.prepare.version"
            f" || ({same_weights('self.prepare.source', 'oldSelf.prepare.source')})",
            "a version means one set of bytes: change weights.prepare.version together with weights.prepare.source",
        ),
        Rule(
            "prepared-source-is-committed",
            "!has(self.prepare) || !has(self.version) || self.prepare.version != self.version"
            " || (has(self.source)"
            f" && {same_weights('self.source', 'self.prepare.source')})",
            "weights.prepare has the same version as weights, so it must have the same source:"
            " copy weights.prepare.source to weights.source",
        ),
        Rule(
            "committed-as-prepared",
            "!has(self.version) || !has(oldSelf.prepare) || self.version != oldSelf.prepare.version"
            " || (has(oldSelf.version) && self.version == oldSelf.version)"
            f" || (has(self.source) && {same_weights('self.source', 'oldSelf.prepare.source')})",
            "this version was prepared from another source: copy weights.prepare.source to weights.source,"
            " or choose another version",
        ),
    )


class Staleness(ApiModel):
    """How far behind an engine may serve."""

    max_version_lag: int = Field(
        default=0, ge=0, le=1000, description="Versions that a routable engine may be behind weights.version; 0: none."
    )
