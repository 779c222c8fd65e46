"""What the plan is made from: what is wanted, what was read from the engine, and what this agent has done so far."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from sglang_rollout.protocol.desired import AgentDesired, Execution, ExecutionState
from sglang_rollout.protocol.memory import LaunchOptions, MemoryTag
from sglang_rollout.protocol.operations import CHECKS, OperationResult
from sglang_rollout.protocol.report import EngineState
from sglang_rollout.protocol.weights import KVCache, PauseMode, Source, Step, WeightMove, WeightVersion

from .journal import OperationRecord
from .sglang_versions import NEWEST, Release

# The watchdog counts from the last step, and the agent may be slow: a third of the time is left to it.
IN_PLACE_SHARE = 2 / 3

_STRENGTH = {PauseMode.IN_PLACE: 1, PauseMode.RETRACT: 2, PauseMode.ABORT: 3}


class Way(StrEnum):
    """How weights get into the engine: it reads their folder by itself, its ranks take them from the stage, or a
    trainer hands them over while it is paused."""

    ENGINE = "engine"
    STAGE = "stage"
    LIVE = "live"


@dataclass(frozen=True)
class EngineFacts:
    """Read from the engine now. `weights` is what /model_info says; `ready` is /ready (503 while paused). launch: the
    flags that it was started with. watchdog_seconds: its --watchdog-timeout."""

    start_id: str = ""
    state: EngineState = EngineState.ABSENT
    weights: WeightVersion = field(default_factory=lambda: WeightVersion("", ""))
    ready: bool = False
    launch: LaunchOptions = field(default_factory=LaunchOptions)
    release: Release = NEWEST
    watchdog_seconds: float = 300.0


@dataclass(frozen=True)
class Progress:
    """How far this process has brought one move on one start of the engine. Times are the monotonic clock's.

    flushed: since the engine was last paused. retry_at: until then the old weights serve, after a busy cache.
    error: the move is given up. failures: applies that failed. continued: the move's last step was reached.
    preparing: in the background. checked: every rank can take what is staged. tried: the source that it was prepared
    from, or tried to be.
    """

    move_id: str
    start_id: str
    prepared: bool = False
    preparing: bool = False
    way: Way = Way.ENGINE
    checked: bool = False
    root: str = ""
    nonfinite: int = 0
    done_bytes: int = 0
    of_bytes: int = 0
    tried: Source | None = None
    flushed: bool = False
    failures: int = 0
    busy: int = 0  # times that the cache could not be flushed
    retry_at: float = 0.0
    error: str = ""
    refused: bool = False
    aborted: bool = False
    continued: bool = False
    began_at: float | None = None
    paused_at: float | None = None
    prepare_seconds: float = 0.0
    stall_seconds: float = 0.0
    problem: str = ""  # of the last step; it is tried again

    @property
    def given_up(self) -> bool:
        return bool(self.error) or self.aborted


@dataclass(frozen=True)
class Emptying:
    """How far this process has come in making the engine idle, so that memory can be released.

    requests: running and queued ones at the last look. emptied: since the last pause, seen by the engine itself."""

    start_id: str
    began_at: float
    looked_at: float
    requests: int
    emptied: bool = False


@dataclass(frozen=True)
class Situation:
    """pause: how the engine is paused now, None when it runs; paused_since: when, by the monotonic clock; turned: in
    place of a pause in place. dirty: its bytes may be of any version; applying: because they are being put in right
    now. released: also what a call that was begun may have released; unsure: there is such a call, and nobody waits
    for its answer any more. void: why its bytes are no weights at all. held_root: digest of the manifest of what the
    engine holds, where it is known; held_checksum, held_sharding: SGLang's own, where it was asked for. ahead: of
    desired.prepare. background: something is being prepared, for whatever order, or has not ended yet. drain_seconds:
    that requests may take to end before the engine does. open_move: id of the move that made it dirty."""

    desired: AgentDesired
    facts: EngineFacts
    pause: PauseMode | None
    dirty: bool
    progress: Progress | None
    now: float
    rank: int = 0
    applying: bool = False
    paused_since: float = 0.0
    turned: bool = False
    released: frozenset[MemoryTag] = frozenset()
    unsure: bool = False
    void: str = ""
    emptying: Emptying | None = None
    operations: tuple[OperationRecord, ...] = ()
    operation_look_at: float = 0.0
    drain_seconds: float = 45.0
    open_move: str = ""
    held_root: str = ""
    held_checksum: str = ""
    held_sharding: str = ""
    ahead: Progress | None = None
    background: bool = False

    @property
    def move(self) -> WeightMove | None:
        return self.desired.move

    @property
    def restart_ordered(self) -> bool:
        """Of the process that is there now."""
        return self.facts.start_id != "" and self.desired.restart_engine == self.facts.start_id

    @property
    def at_target(self) -> bool:
        return self.move is not None and not self.dirty and not self.void and self.holds(self.move)

    def holds(self, move: WeightMove) -> bool:
        """By the label; what a label stands for is told by the manifest's digest, else by the folder."""
        if self.facts.weights.version != move.weights.version:
            return False
        same_folder = self.facts.weights.path == move.weights.path != ""
        if self.held_root and move.source.root:
            # Roots tell how the tensors were divided, too: one read from its folder may have another.
            return self.held_root == move.source.root or same_folder
        return bool(self.held_root or move.source.root) or not move.weights.path or same_folder

    @property
    def live(self) -> bool:
        """There is a move and it is not given up."""
        return self.move is not None and self.progress is not None and not self.progress.given_up

    @property
    def moving(self) -> bool:
        """The move is to touch the engine and has not put its weights in."""
        return self.live and self.move is not None and self.move.until >= Step.PAUSE and not self.at_target

    @property
    def shut(self) -> bool:
        """A token cannot be made, or would be of no version: the engine stays paused whatever `execution` says."""
        return bool(self.released or self.void)

    @property
    def execution(self) -> Execution:
        """The level to be at: what is asked for, but for an engine that cannot run."""
        asked = self.desired.execution
        if self.shut and asked.state is ExecutionState.RUNNING:
            return Execution(ExecutionState.PAUSED, PauseMode.RETRACT)
        return asked

    @property
    def level_holds(self) -> bool:
        """The engine runs or is paused as `execution` says, or as it must be because it cannot run."""
        return (self.pause is not None) == (self.execution.state is ExecutionState.PAUSED)

    @property
    def asked_level_holds(self) -> bool:
        """The engine runs or is paused as was asked for."""
        return (self.pause is not None) == (self.desired.execution.state is ExecutionState.PAUSED)

    @property
    def flushed(self) -> bool:
        """No cache of other weights is left, or it may stay. Memory that was released holds none."""
        assert self.move is not None
        assert self.progress is not None
        kept = self.move.kv_cache is KVCache.KEEP
        return kept or self.progress.flushed or MemoryTag.KV_CACHE in self.released

    @property
    def ready_to_apply(self) -> bool:
        assert self.progress is not None
        return self.flushed and (self.progress.way is Way.ENGINE or self.progress.checked)

    @property
    def move_mode(self) -> PauseMode:
        """How this engine is paused for its move: an InPlace pause leaves a step in flight, for which our own loader
        waits. An engine that loads by itself and has no cheap way to wait is paused by Retract, which drains it."""
        assert self.move is not None
        mode = self.move.pause_mode
        staged = self.progress is not None and self.progress.way is Way.STAGE
        waits = staged or self.facts.release.cheap_fence
        return PauseMode.RETRACT if mode is PauseMode.IN_PLACE and not waits else mode

    @property
    def checking(self) -> bool:
        """A check is under way: it stops the scheduler for as long as it takes."""
        return any(
            record.report.result is OperationResult.RUNNING and record.operation.kind in CHECKS
            for record in self.operations
        )


def weaker(pause: PauseMode | None, wanted: PauseMode) -> bool:
    return pause is None or _STRENGTH[pause] < _STRENGTH[wanted]


def stronger(situation: Situation) -> PauseMode:
    """The pause that the move and `execution` together ask for."""
    modes = [situation.move_mode]
    if situation.execution.state is ExecutionState.PAUSED:
        modes.append(situation.execution.pause_mode)
    return max(modes, key=_STRENGTH.__getitem__)


def in_force(facts: EngineFacts, marked: PauseMode | None, continued_here: bool) -> PauseMode | None:
    """How the engine is paused. `marked`: how this agent paused it last, kept over its restarts; `continued_here`:
    this process has continued it since. Not ready without either is a pause of unknown, so of the weakest, kind;
    not ready after our continue is SGLang's own health check having failed."""
    if facts.ready:
        return None
    if marked is not None:
        return marked
    return None if continued_here else PauseMode.IN_PLACE


def in_place_ends_at(situation: Situation) -> float:
    """When a pause in place must have become another one; the monotonic clock's."""
    watchdog = situation.facts.watchdog_seconds
    if situation.pause is not PauseMode.IN_PLACE or watchdog <= 0:
        return math.inf
    return situation.paused_since + watchdog * IN_PLACE_SHARE


def should_run(situation: Situation) -> bool:
    """Requests are meant to be served now: what the generation probe may judge."""
    if situation.rank > 0 or situation.facts.state is not EngineState.SERVING or situation.shut:
        return False
    if situation.desired.hands_off:
        return situation.facts.ready
    return (
        situation.pause is None
        and not situation.dirty
        and not situation.moving
        and not situation.checking
        and situation.desired.execution.state is ExecutionState.RUNNING
    )


def may_abort(situation: Situation) -> bool:
    """The move is to be given up and its apply has not begun."""
    return bool(
        situation.move and situation.move.abort and situation.live and not situation.dirty and not situation.at_target
    )
