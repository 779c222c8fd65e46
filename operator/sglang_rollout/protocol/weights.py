"""How a version of the weights is named and moved on one engine, step by step."""

from __future__ import annotations

from dataclasses import dataclass
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
    """One version: an opaque label and the checkpoint folder (as seen in the engine's pods) that holds it."""

    version: str
    path: str


class Step(IntEnum):
    """Steps of a weight move on one engine, in order. Asking for a step asks for all before it.

    PREPARE  the checkpoint is checked against the running one, the engine sees nothing
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
