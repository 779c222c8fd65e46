"""What to do next with one engine: a pure function of what is wanted, what was read from the engine, and what this
agent has done so far. It is asked again after every step, so a step that was lost is simply planned again.

Not dirty: prepare -> pause -> flush -> apply -> continue, as far as the move's `until` allows; then the level that
`execution` asks for. Dirty (an apply was begun and not read back): paused whatever is asked, and applied again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_rollout.protocol.desired import AgentDesired, ExecutionState
from sglang_rollout.protocol.report import EngineState, MoveReport
from sglang_rollout.protocol.weights import KVCache, PauseMode, Step, WeightMove, WeightVersion

MAX_APPLIES = 2  # once, and once more from scratch

_STRENGTH = {PauseMode.IN_PLACE: 1, PauseMode.RETRACT: 2, PauseMode.ABORT: 3}


@dataclass(frozen=True)
class EngineFacts:
    """Read from the engine now. `weights` is what /model_info says; `ready` is /ready (503 while paused)."""

    start_id: str = ""
    state: EngineState = EngineState.ABSENT
    weights: WeightVersion = field(default_factory=lambda: WeightVersion("", ""))
    ready: bool = False


@dataclass(frozen=True)
class Progress:
    """How far this process has brought one move on one start of the engine. Times are the monotonic clock's.

    flushed: since the engine was last paused. retry_at: until then the old weights serve, after a busy cache.
    error: the move is given up. failures: applies that failed. continued: the move's last step was reached.
    """

    move_id: str
    start_id: str
    prepared: bool = False
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
class Situation:
    """pause: how the engine is paused now, None when it runs. dirty: its bytes may be of any version."""

    desired: AgentDesired
    facts: EngineFacts
    pause: PauseMode | None
    dirty: bool
    progress: Progress | None
    now: float
    rank: int = 0

    @property
    def move(self) -> WeightMove | None:
        return self.desired.move

    @property
    def at_target(self) -> bool:
        return self.move is not None and not self.dirty and self.facts.weights == self.move.weights

    @property
    def live(self) -> bool:
        """There is a move and it is not given up."""
        return self.move is not None and self.progress is not None and not self.progress.given_up


# --- actions ---


@dataclass(frozen=True)
class Nothing:
    """until: when to look again, if nothing happens before."""

    why: str = ""
    until: float | None = None


@dataclass(frozen=True)
class Prepare:
    move: WeightMove


@dataclass(frozen=True)
class Pause:
    mode: PauseMode


@dataclass(frozen=True)
class Flush:
    """force: what holds the cache is aborted, since a dirty engine cannot run on to free it."""

    force: bool = False


@dataclass(frozen=True)
class Apply:
    move: WeightMove


@dataclass(frozen=True)
class Continue:
    pass


Action = Nothing | Prepare | Pause | Flush | Apply | Continue


def in_force(facts: EngineFacts, marked: PauseMode | None, continued_here: bool) -> PauseMode | None:
    """How the engine is paused. `marked`: how this agent paused it last, kept over its restarts; `continued_here`:
    this process has continued it since. Not ready without either is a pause of unknown, so of the weakest, kind;
    not ready after our continue is SGLang's own health check having failed."""
    if facts.ready:
        return None
    if marked is not None:
        return marked
    return None if continued_here else PauseMode.IN_PLACE


def next_action(situation: Situation) -> Action:
    if situation.facts.state is not EngineState.SERVING:
        return Nothing()
    if situation.rank > 0:
        return _prepare(situation) or Nothing()
    if situation.dirty:
        return _repair(situation)
    return _advance(situation) or _execute(situation)


def _prepare(situation: Situation) -> Action | None:
    move, progress = situation.move, situation.progress
    if move is None or progress is None or progress.given_up or progress.prepared or move.until < Step.PREPARE:
        return None
    if situation.now < progress.retry_at:
        return Nothing(progress.problem, progress.retry_at)
    return Prepare(move)


def _repair(situation: Situation) -> Action:
    """The engine is dirty: it stays paused until an apply has been read back."""
    move, progress = situation.move, situation.progress
    if situation.pause is None:
        return Pause(PauseMode.RETRACT)
    if not repairable(situation):
        return Nothing("the engine holds weights of no known version: it must be restarted or moved again")
    assert move is not None
    assert progress is not None
    if situation.now < progress.retry_at:
        return Nothing(progress.problem, progress.retry_at)
    if not progress.prepared:
        return Prepare(move)
    if _weaker(situation.pause, move.pause_mode):
        return Pause(move.pause_mode)
    if move.kv_cache is KVCache.FLUSH and not progress.flushed:
        return Flush(force=True)
    return Apply(move)


def repairable(situation: Situation) -> bool:
    """An order to apply is there and not used up. An abort does not count: an apply that has begun is repeated."""
    move, progress = situation.move, situation.progress
    return (
        move is not None
        and progress is not None
        and move.until >= Step.APPLY
        and not progress.error
        and progress.failures < MAX_APPLIES
    )


def _advance(situation: Situation) -> Action | None:
    """The move's next step on a clean engine; None when the level of `execution` decides."""
    move, progress = situation.move, situation.progress
    if not situation.live:
        return None
    assert move is not None
    assert progress is not None
    if situation.at_target:
        if Step.PAUSE <= move.until < Step.CONTINUE and not progress.continued:
            return Pause(_stronger(situation)) if situation.pause is None else Nothing("waiting for the fleet")
        return None
    if action := _prepare(situation):
        return action
    if move.until < Step.PAUSE or situation.now < progress.retry_at:
        return None
    if _weaker(situation.pause, _stronger(situation)):
        return Pause(_stronger(situation))
    if move.kv_cache is KVCache.FLUSH and not progress.flushed:
        return Flush()
    return Apply(move) if move.until >= Step.APPLY else Nothing("waiting for the fleet")


def _execute(situation: Situation) -> Action:
    execution = situation.desired.execution
    retry_at = situation.progress.retry_at if situation.progress and situation.live else 0.0
    if execution.state is ExecutionState.PAUSED:
        if _weaker(situation.pause, execution.pause_mode):
            return Pause(execution.pause_mode)
    elif situation.pause is not None:
        return Continue()
    return Nothing(until=retry_at if retry_at > situation.now else None)


def _weaker(pause: PauseMode | None, wanted: PauseMode) -> bool:
    return pause is None or _STRENGTH[pause] < _STRENGTH[wanted]


def _stronger(situation: Situation) -> PauseMode:
    """The pause that the move and `execution` together ask for."""
    assert situation.move is not None
    execution = situation.desired.execution
    modes = [situation.move.pause_mode]
    if execution.state is ExecutionState.PAUSED:
        modes.append(execution.pause_mode)
    return max(modes, key=_STRENGTH.__getitem__)


def may_abort(situation: Situation) -> bool:
    """The move is to be given up and its apply has not begun."""
    return bool(
        situation.move and situation.move.abort and situation.live and not situation.dirty and not situation.at_target
    )


def moving(situation: Situation) -> bool:
    """The move is to touch the engine and has not put its weights in."""
    move = situation.move
    return situation.live and move is not None and move.until >= Step.PAUSE and not situation.at_target


def should_run(situation: Situation) -> bool:
    """Requests are meant to be served now: what the generation probe may judge."""
    return (
        situation.rank == 0
        and situation.facts.state is EngineState.SERVING
        and situation.pause is None
        and not situation.dirty
        and not moving(situation)
        and situation.desired.execution.state is ExecutionState.RUNNING
    )


# --- what is reported of a move ---


def reached(situation: Situation) -> Step:
    move, progress = situation.move, situation.progress
    if move is None or progress is None or situation.facts.state is not EngineState.SERVING:
        return Step.NONE
    prepared = min(Step.PREPARE, move.until) if progress.prepared else Step.NONE
    if situation.dirty or progress.given_up:
        return prepared
    if situation.rank > 0:
        return move.until if progress.prepared else Step.NONE
    held = situation.pause is not None
    if situation.at_target:
        if progress.continued or (move.until is Step.CONTINUE and _level_holds(situation)):
            return Step.CONTINUE
        if move.until is Step.CONTINUE or held:
            return Step.APPLY
        return Step.PREPARE
    flushed = progress.flushed or move.kv_cache is KVCache.KEEP
    if held and prepared and flushed and not _weaker(situation.pause, move.pause_mode):
        return min(Step.PAUSE, move.until)
    return prepared


def _level_holds(situation: Situation) -> bool:
    """The engine runs or is paused as `execution` says."""
    return (situation.pause is not None) == (situation.desired.execution.state is ExecutionState.PAUSED)


def move_report(situation: Situation) -> MoveReport | None:
    move, progress = situation.move, situation.progress
    if move is None or progress is None:
        return None
    lost = situation.dirty and not repairable(situation)
    # An error beside `dirty: false` says that the old weights serve: never while an apply is being repeated.
    problem = progress.error or progress.problem or "an apply was begun and not read back"
    return MoveReport(
        id=move.id,
        reached=reached(situation),
        error=problem if lost else "" if situation.dirty else progress.error,
        refused=progress.refused and not situation.dirty,
        dirty=lost,
        aborted=progress.aborted and _level_holds(situation),
        prepare_seconds=progress.prepare_seconds,
        stall_seconds=progress.stall_seconds,
    )
