"""How a version of the weights is named and moved on one engine, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum


class PauseMode(StrEnum):
    """What a pause does with running requests (transitions: SGLang's /pause_generation).

    RETRACT puts them back into the queue, their KV is recomputed; IN_PLACE freezes them with their KV;
    ABORT is RETRACT followed by aborting them all, never SGLang's own abort mode, which may loop for ever.
    """

    ABORT = "Abort"
    RETRACT = "Retract"
    IN_PLACE = "InPlace"


class KVCache(StrEnum):
    FLUSH = "Flush"
    KEEP = "Keep"


@dataclass(frozen=True)
class WeightVersion:
    """One version: an opaque label and the checkpoint folder (as seen in the engine's pods) that holds it; path is
    empty for weights that never lay in a folder, and an engine cannot be started with those."""

    version: str
    path: str


class SourceKind(StrEnum):
    """How the bytes of a move come to an engine.

    DISK      from the folder weights.path: by way of the agent's stage where there is one, else by the engine
    STAGED    a trainer sends them to every agent of the engine while it generates; applied from the stage
    KEPT      what was staged before: this agent's own copy, else that of a peer; applied from the stage
    DIRECT    a trainer sends them into the paused engine by its own collectives (SGLang: from_distributed)
    COLOCATED a trainer on the same GPUs hands them to the paused engine (SGLang: from_tensor, CUDA IPC)
    """

    DISK = "Disk"
    STAGED = "Staged"
    KEPT = "Kept"
    DIRECT = "Direct"
    COLOCATED = "Colocated"


class Verify(StrEnum):
    """What is compared after an apply. FAST: sums of the engine's parameters with those of the stage, and between the
    ranks; CHECKSUM: SGLang's own as well."""

    NONE = "None"
    FAST = "Fast"
    CHECKSUM = "Checksum"


@dataclass(frozen=True)
class Source:
    """Where a move finds its bytes.

    senders: host:port of the trainer's ranks that send, in the order in which they do. transport: of
    api.weights.DistributedSource. members: how many agents the senders will hear from in this move. epoch: of the
    membership; a transfer group of another one is not used again.
    root: digest of the manifest where it is known; what is staged or kept must have it.
    peers: host:port of agents that keep a copy of `root`.
    allow_nonfinite: Inf and NaN are counted, not refused.
    """

    kind: SourceKind = SourceKind.DISK
    senders: list[str] = field(default_factory=list)
    transport: str = "Auto"
    members: int = 0
    epoch: int = 0
    root: str = ""
    peers: list[str] = field(default_factory=list)
    allow_nonfinite: bool = False


class Step(IntEnum):
    """Steps of a weight move on one engine, in order. Asking for a step asks for all before it.

    PREPARE  the weights are checked against the running ones, and staged where they are applied from a stage; the
             engine sees nothing
    PAUSE    the engine is paused and its KV cache flushed; still the old weights
    APPLY    new weights in, version set and read back; still paused
    CONTINUE the engine generates again, unless execution is Paused
    """

    NONE = 0
    PREPARE = 1
    PAUSE = 2
    APPLY = 3
    CONTINUE = 4


@dataclass(frozen=True)
class WeightMove:
    """The order to move one engine to `weights`, as far as `until`. Same id: the same move, further along.

    With `abort`, the agent gives up a move that has not begun to apply: it continues on the old weights. Once
    APPLY has begun a move is never aborted: it is repeated until it holds, or the engine is restarted.
    """

    id: str
    weights: WeightVersion
    until: Step
    pause_mode: PauseMode = PauseMode.RETRACT
    kv_cache: KVCache = KVCache.FLUSH
    timeout_seconds: float = 300.0
    abort: bool = False
    source: Source = field(default_factory=Source)
    verify: Verify = Verify.FAST
