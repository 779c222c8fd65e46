"""What must outlive the agent's process: the last accepted desired state, and what it was doing to which engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sglang_rollout.protocol.desired import AgentDesired, GroupAssignment
from sglang_rollout.protocol.weights import PauseMode, WeightVersion
from sglang_rollout.protocol.wire import dumps, loads
from sglang_rollout.serving.private_file import write_private


@dataclass(frozen=True)
class OpenApply:
    """New weights were ordered into the engine `start_id` and not read back: its bytes may be of any version."""

    start_id: str
    move_id: str
    weights: WeightVersion


@dataclass(frozen=True)
class PauseMark:
    """The engine `start_id` was paused in `mode`, and not continued since."""

    start_id: str
    mode: PauseMode


@dataclass(frozen=True)
class Joined:
    """What the engine `start_id` of a group joined when it started."""

    start_id: str
    group: GroupAssignment
    rank0_start_id: str


@dataclass(frozen=True)
class Memory:
    desired: AgentDesired | None = None
    open_apply: OpenApply | None = None
    pause: PauseMark | None = None
    joined: Joined | None = None


class MemoryFile:
    """Keeps a Memory in a file. One that is there but unreadable is an error: an agent that forgot an open apply
    would continue an engine of mixed weights. Raises MalformedMessage."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._memory = loads(Memory, path.read_bytes())
        except FileNotFoundError:
            self._memory = Memory()

    @property
    def memory(self) -> Memory:
        return self._memory

    def write(self, memory: Memory) -> None:
        """On disk before it returns."""
        if memory != self._memory:
            write_private(self._path, dumps(memory))
            self._memory = memory
