"""What an engine keeps in GPU memory, and the launch flags that releasing it needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class MemoryTag(StrEnum):
    """SGLang's tags of /release_memory_occupation, by the names of the resource."""

    WEIGHTS = "weights"
    KV_CACHE = "kvCache"
    CUDA_GRAPH = "cudaGraph"


@dataclass(frozen=True)
class LaunchOptions:
    """Flags that only a new engine process can have. Having more than is needed does no harm, so they are asked for
    and never taken back.

    memory_saver: --enable-memory-saver, without which nothing can be released; weights_backup:
    --enable-weights-cpu-backup, without which released weights are lost and must be loaded again.
    """

    memory_saver: bool = False
    weights_backup: bool = False

    def covers(self, other: LaunchOptions) -> bool:
        """Whether an engine with these flags can do all that one with `other` can."""
        return (self.memory_saver or not other.memory_saver) and (self.weights_backup or not other.weights_backup)


@dataclass(frozen=True)
class MemoryOrder:
    """released: the tags that must be released, all others resident. Given only for an engine that no router has.
    drain_seconds: how long running requests may end by themselves before what is left is aborted."""

    released: list[MemoryTag] = field(default_factory=list)
    drain_seconds: float = 30.0
