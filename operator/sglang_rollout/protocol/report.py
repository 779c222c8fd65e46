"""What an agent reports of its pod and engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from .memory import LaunchOptions, MemoryTag
from .operations import OperationReport
from .weights import Step

# How AgentReport.message begins while a pause that was asked to be InPlace is a Retract one: in time before SGLang's
# scheduler watchdog, which takes frozen requests for a hang and kills the engine.
TURNED_INTO_RETRACT = "InPlace turned into Retract"


class EngineState(StrEnum):
    ABSENT = "Absent"  # no launcher has asked to start yet, or the engine container is down
    WAITING = "Waiting"  # the launcher waits: for the group, or because what it should load is refused
    STARTING = "Starting"  # SGLang runs but does not answer yet
    SERVING = "Serving"  # SGLang answers (rank 0: /health and /model_info; other ranks: its process lives)
    STOPPING = "Stopping"  # being killed or drained


@dataclass(frozen=True)
class EngineReport:
    """One engine process, as read from it, never as remembered.

    start_id: made by the launcher at each engine start; a new one means new keys and lost state.
    weight_version, model_path: from /model_info; empty while not SERVING and on ranks > 0.
    data_key: what a router presents to this engine. The admin key never leaves the pod.
    paused: from /ready (503 while paused).
    failure: why the engine is not there, one sentence with the last log line that matters.
    launch: the flags that it was started with.
    released: kept by the agent for this start, since SGLang does not tell; also while a release is under way.
    weights_void: an id of why the bytes are no weights of any version (released without a backup, reset), until a
    move has put whole ones there; weight_version is empty meanwhile, whatever label the engine shows.
    weights_root: digest of the manifest that they were applied from; empty for those that the engine read by itself.
    weights_checksum: SGLang's own, of all of them, taken when they were put in, where their move asked for it;
    weights_sharding: of which layout.
    """

    state: EngineState = EngineState.ABSENT
    start_id: str = ""
    started_at: str = ""
    weight_version: str = ""
    model_path: str = ""
    data_key: str = ""
    paused: bool = False
    sglang_version: str = ""
    failure: str = ""
    launch: LaunchOptions = field(default_factory=LaunchOptions)
    released: list[MemoryTag] = field(default_factory=list)
    weights_void: str = ""
    weights_root: str = ""
    weights_checksum: str = ""
    weights_sharding: str = ""


@dataclass(frozen=True)
class MoveReport:
    """How far the move `id` has come. `error` without `dirty`: refused or failed before the first byte, the old
    weights serve. `dirty`: bytes may have changed; the engine stays paused and must not be continued.

    root: digest of the manifest of what is prepared, where it is staged. staged_bytes, of_bytes: progress of staging
    (of_bytes 0: not known yet). nonfinite: values that are Inf or NaN in it, where they are allowed.
    """

    id: str
    reached: Step = Step.NONE
    error: str = ""
    refused: bool = False  # the checkpoint itself is wrong: trying again cannot help
    dirty: bool = False
    aborted: bool = False
    prepare_seconds: float = 0.0
    stall_seconds: float = 0.0  # pause to continue; 0 before it continued
    root: str = ""
    staged_bytes: int = 0
    of_bytes: int = 0
    nonfinite: int = 0


@dataclass(frozen=True)
class StagedWeights:
    """A version in an agent's stage, whole and verified. size in bytes."""

    version: str
    root: str
    size: int = 0


@dataclass(frozen=True)
class StageReport:
    """held: what moves and peers can be served from. problem: why nothing can be staged here; empty: it can."""

    held: list[StagedWeights] = field(default_factory=list)
    problem: str = ""


@dataclass(frozen=True)
class AgentReport:
    """GET /v1/report and the answer to PUT /v1/desired. `revision` grows with every change of the rest and starts
    again when `agent_start` (a random id of the agent's process) changes.

    generation, lease_term: of the desired state last accepted; 0 before the first.
    probe_failure: why the generation probe found the engine wedged; empty when it did not.
    operations: of those asked for, and how they went.
    prepare: how far AgentDesired.prepare is, as a move that never goes beyond PREPARE.
    drained: asked to drain, and nothing runs any more.
    message: what the agent is doing or waiting for, for people.
    """

    revision: int
    agent_start: str
    pod_uid: str
    rank: int
    lease_term: int = 0
    generation: int = 0
    incarnation: int = 0
    engine: EngineReport = field(default_factory=EngineReport)
    move: MoveReport | None = None
    probe_failure: str = ""
    drained: bool = False
    operations: list[OperationReport] = field(default_factory=list)
    prepare: MoveReport | None = None
    stage: StageReport = field(default_factory=StageReport)
    message: str = ""


@dataclass(frozen=True)
class AgentIdentity:
    """GET /v1/identity, open to anyone in the pod network: holds no secret. Agents of the same engine use it to
    confirm rank 0 and to notice that it started again (then they restart their own engine process to rejoin)."""

    pod_uid: str
    rank: int
    incarnation: int
    start_id: str
