"""status: what the operator last saw and decided. One writer, the operator; written only on a change."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from .conditions import Condition, timestamp
from .memory import Residency
from .schema import ApiModel, Text, Timestamp, list_type

HISTORY_MAX = 32

ExecutionPhase = Literal["Running", "Pausing", "Paused", "Resuming"]
WeightPhase = Literal["Idle", "Staging", "Prepared", "Committing", "Verifying", "Failed"]
Decision = Literal["Commit", "Abort"]
CheckResult = Literal["Running", "Passed", "Mismatch", "Unsupported", "Error"]
ReleasedTag = Literal["weights", "kvCache", "cudaGraph"]


class MemoryStatus(ApiModel):
    """What is in GPU memory over the whole fleet: Released only when it is on every engine."""

    weights: Residency | None = Field(default=None, description="The model's weights.")
    kv_cache: Residency | None = Field(default=None, description="The KV cache.")
    cuda_graph: Residency | None = Field(default=None, description="Captured CUDA graphs.")


class TransferStatus(ApiModel):
    """How the bytes of a move come to the engines."""

    kind: Literal["Disk", "Staged", "Kept", "Direct", "Colocated", "External"] = Field(
        default="Disk",
        description="Staged: a trainer sends to the agents. Direct, Colocated: a trainer gives to the paused engines."
        " Kept: staged before.",
    )
    transport: str = Field(default="Auto", max_length=32, description="As weights.source.distributed.transport.")
    senders: tuple[Annotated[str, Field(max_length=260)], ...] = Field(
        default=(),
        max_length=1000,
        json_schema_extra=list_type("atomic"),
        description="host:port of the trainer's ranks that send.",
    )


class WeightTransaction(ApiModel):
    """The fleet's last move to other weights. Once the decision is Commit it only goes forward."""

    id: str = Field(max_length=128, description="Identity of the move.")
    version: str = Field(default="", max_length=128, description="Label that it moves to.")
    path: str = Field(default="", max_length=1024, description="Folder of the checkpoint that it moves to.")
    source: TransferStatus = Field(default=TransferStatus(), description="How they come, as spec said then.")
    root: str = Field(
        default="",
        max_length=128,
        description="Digest of what is staged, the same on every engine; absent: not staged.",
    )
    epoch: int = Field(default=0, ge=0, description="Membership that the transfer was planned with.")
    members: int = Field(default=0, ge=0, description="Agents that the trainer's senders will hear from.")
    generation: int = Field(default=0, ge=0, description="Generation of the resource that it was planned from.")
    decision: Decision | None = Field(default=None, description="Commit or Abort; absent: not decided yet.")
    prepared: int = Field(default=0, ge=0, description="Engines that hold the new weights, checked.")
    committed: int = Field(default=0, ge=0, description="Engines that serve them.")
    staged_bytes: int = Field(default=0, ge=0, description="Bytes staged by the engine that is furthest behind.")
    of_bytes: int = Field(default=0, ge=0, description="Bytes to stage; 0: not known yet.")
    non_finite: int = Field(default=0, ge=0, description="Values in them that are Inf or NaN, where allowed.")
    started_at: Timestamp | None = Field(default=None, description="When it was planned.")
    decided_at: Timestamp | None = Field(default=None, description="When it was decided to commit.")
    completed_at: Timestamp | None = Field(default=None, description="When it ended.")
    stall_seconds: str | None = Field(
        default=None,
        max_length=32,
        description="Longest time that an engine generated nothing, in seconds, as a decimal.",
    )
    message: str = Field(default="", max_length=2048, description="Why it failed or what it waits for.")


class CommittedVersion(ApiModel):
    """A version that the fleet has served."""

    version: str = Field(max_length=128, description="Its label.")
    path: str = Field(
        default="",
        max_length=1024,
        description="Folder of its checkpoint, for engines that start later; absent: a trainer sent it.",
    )
    root: str = Field(default="", max_length=128, description="Digest of it where it was staged.")
    committed_at: Timestamp = Field(description="When the fleet moved to it.")


class PreparedStatus(ApiModel):
    """Weights that are staged ahead of their commit."""

    version: str = Field(max_length=128, description="Their label.")
    path: str = Field(default="", max_length=1024, description="Folder of their checkpoint; absent: a trainer's.")
    source: TransferStatus = Field(default=TransferStatus(), description="How they come, as spec said then.")
    generation: int = Field(default=0, ge=0, description="Generation of the resource that first asked for them.")
    attempt: int = Field(default=1, ge=1, description="Grows when it is tried again after a failure.")
    members: int = Field(default=0, ge=0, description="Agents that the trainer's senders will hear from.")
    engines: int = Field(default=0, ge=0, description="Engines that hold them, whole and checked.")
    root: str = Field(default="", max_length=128, description="Digest of what is staged.")
    failed_at: Timestamp | None = Field(default=None, description="When it failed last.")
    message: str = Field(default="", max_length=2048, description="Why it failed or what it waits for.")


class WeightsStatus(ApiModel):
    """Which weights the fleet serves."""

    version: str = Field(default="", max_length=128, description="What every routable engine serves.")
    target_version: str = Field(default="", max_length=128, description="What the fleet should serve.")
    phase: WeightPhase = Field(default="Idle", description="How far the move to the target is.")
    served: bool = Field(
        default=False,
        description="Whether an engine was ever routable; before that a refused version protects nothing.",
    )
    epoch: int = Field(
        default=0, ge=0, description="Membership of the transfer group; grows when an engine comes or goes."
    )
    membership: str = Field(default="", max_length=64, description="Digest of the pods that make up the epoch.")
    transaction: WeightTransaction | None = Field(default=None, description="The last move.")
    prepared: PreparedStatus | None = Field(default=None, description="What spec.weights.prepare has come to.")
    history: tuple[CommittedVersion, ...] = Field(
        default=(),
        max_length=HISTORY_MAX,
        json_schema_extra=list_type("atomic"),
        description="Versions served, oldest first; it starts with the one that the fleet booted with.",
    )

    def with_committed(self, version: str, path: str, now: datetime, root: str = "") -> WeightsStatus:
        """History with `version` as its newest entry, bounded; unchanged when it is the newest already. The last entry
        with a folder is never dropped: engines start from it."""
        if self.history and self.history[-1].version == version:
            return self
        entry = CommittedVersion(version=version, path=path, root=root, committed_at=timestamp(now))
        kept = tuple(old for old in self.history if old.version != version)
        history = (*kept, entry)
        if len(history) > HISTORY_MAX:
            bootable = [index for index, old in enumerate(history) if old.path]
            oldest = 1 if bootable and bootable[-1] == 0 else 0
            history = (*history[:oldest], *history[oldest + len(history) - HISTORY_MAX :])
        return self.model_copy(update={"history": history})

    def lag(self, version: str) -> int | None:
        """How many versions `version` is behind the newest committed one; None: it was never committed."""
        versions = [entry.version for entry in self.history]
        return len(versions) - 1 - versions.index(version) if version in versions else None


class EngineStatus(ApiModel):
    """One engine."""

    name: str = Field(max_length=253, description="Name of its StatefulSet.")
    address: str = Field(default="", max_length=253, description="host:port of its HTTP server.")
    agent: str = Field(default="", max_length=253, description="host:port of rank 0's agent.")
    incarnation: int = Field(
        default=0, ge=0, description="Grows each time its pods are recreated or its engine restarts."
    )
    pod_uids: tuple[Annotated[str, Field(max_length=64)], ...] = Field(
        default=(),
        max_length=256,
        json_schema_extra=list_type("atomic"),
        description="UIDs of the pods of this incarnation, by rank.",
    )
    start_id: str = Field(default="", max_length=128, description="Start of its engine process that was last seen.")
    ready: bool = Field(default=False, description="Whether every one of its pods is Ready.")
    routable: bool = Field(default=False, description="Whether it is in the router, at an allowed version.")
    paused: bool = Field(default=False, description="Whether it is paused.")
    released: tuple[ReleasedTag, ...] = Field(
        default=(),
        max_length=3,
        json_schema_extra=list_type("atomic"),
        description="What it has released from GPU memory.",
    )
    weight_version: str = Field(default="", max_length=128, description="Label read back from it.")
    restarts: int = Field(default=0, ge=0, description="Restarts that count against restartPolicy.maxRestarts.")
    restarted_at: Timestamp | None = Field(default=None, description="When its last restart began.")
    message: Text = Field(default="", description="What it waits for or why it is not routable.")


class RouterStatus(ApiModel):
    """The router."""

    url: str = Field(default="", max_length=1024, description="Where clients send requests.")
    registered: int = Field(default=0, ge=0, description="Engines that every pod of the router knows.")


class RestartStatus(ApiModel):
    """The last restart that was asked for."""

    request_id: str = Field(max_length=128, description="Its requestID.")
    started_at: Timestamp | None = Field(default=None, description="When it began.")
    completion_time: Timestamp | None = Field(default=None, description="When the last engine was back.")
    restarted: int = Field(default=0, ge=0, description="Engines that are back.")


class RequestStatus(ApiModel):
    """The last request of its kind."""

    request_id: str = Field(max_length=128, description="Its requestID.")
    result: Literal["Running", "Completed", "Error"] | None = Field(default=None, description="How it went.")
    started_at: Timestamp | None = Field(default=None, description="When it began.")
    completion_time: Timestamp | None = Field(default=None, description="When it ended.")
    message: Text = Field(default="", description="What came of it (of a profile: where it is), or what went wrong.")


class EngineCheckStatus(ApiModel):
    """What a weight check found on one engine."""

    name: str = Field(max_length=253, description="Name of the engine.")
    result: CheckResult = Field(description="How it went there.")
    checksum: str = Field(default="", max_length=128, description="Of all its weights, for Checksum.")
    mismatched_tensors: tuple[Annotated[str, Field(max_length=256)], ...] = Field(
        default=(),
        max_length=10,
        json_schema_extra=list_type("atomic"),
        description="The first tensors that differ from the snapshot.",
    )
    mismatched_count: int = Field(default=0, ge=0, description="How many tensors differ in all.")
    message: str = Field(default="", max_length=256, description="What went wrong or why it cannot.")


class WeightCheckStatus(ApiModel):
    """The last weight check that was asked for."""

    request_id: str = Field(max_length=128, description="Its requestID.")
    action: str = Field(default="", max_length=32, description="Its action.")
    result: CheckResult | None = Field(default=None, description="How it went.")
    weight_version: str = Field(default="", max_length=128, description="Label of the weights that were checked.")
    started_at: Timestamp | None = Field(default=None, description="When it began.")
    completion_time: Timestamp | None = Field(default=None, description="When it ended.")
    mismatched_engines: tuple[Annotated[str, Field(max_length=253)], ...] = Field(
        default=(), max_length=1000, json_schema_extra=list_type("atomic"), description="Engines whose weights differ."
    )
    engines: tuple[EngineCheckStatus, ...] = Field(
        default=(),
        max_length=1000,
        json_schema_extra=list_type("atomic"),
        description="The result of each engine; there when it is over.",
    )
    message: Text = Field(default="", description="What differs or went wrong.")


class Status(ApiModel):
    """What the operator last saw and decided."""

    observed_generation: int = Field(
        default=0, ge=0, description="Generation of the resource that this status answers."
    )
    replicas: int = Field(default=0, ge=0, description="Engines that exist.")
    ready_replicas: int = Field(default=0, ge=0, description="Engines whose every pod is Ready.")
    routable_replicas: int = Field(default=0, ge=0, description="Engines in the router, at an allowed version.")
    selector: str = Field(
        default="", max_length=1024, description="Label selector of the rank-0 pods, for autoscalers."
    )
    execution_state: ExecutionPhase | None = Field(default=None, description="Running, Pausing, Paused or Resuming.")
    memory: MemoryStatus | None = Field(default=None, description="What is in GPU memory.")
    weights: WeightsStatus | None = Field(default=None, description="Which weights the fleet serves.")
    engines: tuple[EngineStatus, ...] = Field(
        default=(), max_length=2000, json_schema_extra=list_type("atomic"), description="The engines, by index."
    )
    router: RouterStatus | None = Field(default=None, description="The router.")
    last_restart: RestartStatus | None = Field(default=None, description="The last restart that was asked for.")
    last_profile: RequestStatus | None = Field(default=None, description="The last profile that was asked for.")
    last_flush_cache: RequestStatus | None = Field(
        default=None, description="The last flush of the KV cache that was asked for."
    )
    last_abort_requests: RequestStatus | None = Field(
        default=None, description="The last abort of all requests that was asked for."
    )
    last_weight_check: WeightCheckStatus | None = Field(
        default=None, description="The last weight check that was asked for."
    )
    conditions: tuple[Condition, ...] = Field(
        default=(),
        max_length=32,
        json_schema_extra=list_type("map", "type"),
        description="The fleet's state by aspect; Ready is the summary.",
    )
