"""What must outlive the agent's process: the last accepted desired state, and what it has done to which engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from sglang_rollout.protocol.desired import AgentDesired, GroupAssignment
from sglang_rollout.protocol.memory import MemoryTag
from sglang_rollout.protocol.operations import Operation, OperationReport
from sglang_rollout.protocol.weights import PauseMode, WeightVersion
from sglang_rollout.protocol.wire import dumps, loads
from sglang_rollout.serving.private_file import write_private


@dataclass(frozen=True)
class OpenApply:
    """New weights were ordered into the engine `start_id` and not read back: its bytes may be of any version.
    root: of what is applied from the stage, which must stay there."""

    start_id: str
    move_id: str
    weights: WeightVersion
    root: str = ""


@dataclass(frozen=True)
class HeldWeights:
    """What was put into the engine `start_id` and read back. SGLang tells the label of it, and of the folder only what
    it has loaded by itself. root: digest of the manifest that it was applied from; empty when there was none.
    checksum, sharding: SGLang's own, where the move asked for it."""

    start_id: str
    weights: WeightVersion
    root: str = ""
    checksum: str = ""
    sharding: str = ""


@dataclass(frozen=True)
class Registration:
    """The weight loader of the engine `start_id` has the stage mapped; with a problem, the engine takes nothing from
    the stage."""

    start_id: str
    problem: str = ""


@dataclass(frozen=True)
class StagedNote:
    """What was staged for the order `order` has `root`. ahead: it may serve a later order of the same weights, too."""

    order: str
    weights: WeightVersion
    root: str
    ahead: bool = False


@dataclass(frozen=True)
class PauseMark:
    """The engine `start_id` was paused in `mode`, and not continued since.

    since: when it was last paused in that mode; the machine's monotonic clock, which restarts of the agent share.
    turned: it was paused in place, and this before its watchdog would have killed it.
    """

    start_id: str
    mode: PauseMode
    since: float = 0.0
    turned: bool = False


@dataclass(frozen=True)
class Residency:
    """What the engine `start_id` has released, which SGLang does not tell.

    doing: tags of a call that was begun and not seen to end; they may be released or not, and both repeating and
    undoing it can kill the engine. void: why its bytes are no weights of any version (EngineReport.weights_void).
    releases: how often its weights were released, so that each time has a name of its own.
    """

    start_id: str
    released: list[MemoryTag] = field(default_factory=list)
    doing: list[MemoryTag] = field(default_factory=list)
    void: str = ""
    releases: int = 0


@dataclass(frozen=True)
class OperationRecord:
    """An operation that was begun on the engine `start_id`, and what came of it. began_at: as PauseMark.since."""

    start_id: str
    operation: Operation
    report: OperationReport
    began_at: float = 0.0


@dataclass(frozen=True)
class Joined:
    """What the engine `start_id` of a group joined when it started."""

    start_id: str
    group: GroupAssignment
    rank0_start_id: str


@dataclass(frozen=True)
class Journal:
    desired: AgentDesired | None = None
    open_apply: OpenApply | None = None
    pause: PauseMark | None = None
    joined: Joined | None = None
    residency: Residency | None = None
    operations: list[OperationRecord] = field(default_factory=list)
    held: HeldWeights | None = None
    registration: Registration | None = None
    staged: list[StagedNote] = field(default_factory=list)

    def without_older_starts(self, present: str) -> Journal:
        """Without what was done to other engine processes than `present`."""

        def of_present(entry: OpenApply | PauseMark | Residency | HeldWeights | Registration | None) -> bool:
            return entry is not None and entry.start_id == present

        return replace(
            self,
            open_apply=self.open_apply if of_present(self.open_apply) else None,
            pause=self.pause if of_present(self.pause) else None,
            residency=self.residency if of_present(self.residency) else None,
            held=self.held if of_present(self.held) else None,
            registration=self.registration if of_present(self.registration) else None,
            operations=[record for record in self.operations if record.start_id == present],
        )


class JournalFile:
    """Keeps a Journal in a file. One that is there but unreadable is an error: an agent that forgot an open apply
    would continue an engine of mixed weights. Raises MalformedMessage."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._on_saved: Callable[[], None] = lambda: None
        try:
            self._written = loads(Journal, path.read_bytes())
        except FileNotFoundError:
            self._written = Journal()
        self._now = self._written

    @property
    def now(self) -> Journal:
        return self._now

    def when_saved(self, tell: Callable[[], None]) -> None:
        """`tell` is called after each change that was written: what is begun is reported while it lasts."""
        self._on_saved = tell

    def remember(self, **changes: object) -> None:
        """To be written by save(), at the latest before the engine hears of anything that cannot be undone."""
        self._now = replace(self._now, **changes)  # type: ignore[arg-type]

    def forget_older_starts(self, present: str) -> None:
        self._now = self._now.without_older_starts(present)

    def save(self) -> None:
        """Outlives this process when it returns. Raises OSError."""
        if self._now != self._written:
            write_private(self._path, dumps(self._now))
            self._written = self._now
            self._on_saved()
