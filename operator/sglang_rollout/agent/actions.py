"""The steps that the plan may ask for, one at a time."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_rollout.protocol.memory import MemoryTag
from sglang_rollout.protocol.operations import Operation
from sglang_rollout.protocol.weights import PauseMode, WeightMove

REPEAT_SECONDS = 0.5  # before a step that could not be made is tried again


@dataclass(frozen=True)
class Nothing:
    """until: when to look again, if nothing happens before."""

    why: str = ""
    until: float | None = None


@dataclass(frozen=True)
class Prepare:
    """Begins it where it takes long: it goes on in the background. ahead: nothing is moved yet."""

    move: WeightMove
    ahead: bool = False


@dataclass(frozen=True)
class Pause:
    """turned: in place of a pause in place that has lasted too long."""

    mode: PauseMode
    turned: bool = False


@dataclass(frozen=True)
class Flush:
    """force: what holds the cache is aborted, since an engine without whole weights cannot run on to free it."""

    force: bool = False


@dataclass(frozen=True)
class Check:
    """Whether every rank of the paused engine can take what is staged; nothing is written."""

    move: WeightMove


@dataclass(frozen=True)
class Apply:
    move: WeightMove


@dataclass(frozen=True)
class Continue:
    pass


@dataclass(frozen=True)
class LookAtLoad:
    """How many requests are left, before memory is released."""


@dataclass(frozen=True)
class Empty:
    """Aborts what is left on a paused engine and sees that nothing is."""


@dataclass(frozen=True)
class Release:
    tags: tuple[MemoryTag, ...]


@dataclass(frozen=True)
class Resume:
    tags: tuple[MemoryTag, ...]


@dataclass(frozen=True)
class Operate:
    """Begins an operation; a check is over with it, a profile or a flush may go on."""

    operation: Operation


@dataclass(frozen=True)
class LookAfter:
    """An operation that goes on: whether a profile's traces are there, or another try to flush. `end`: it is over, and
    reported with that sentence, if this is not the end of it."""

    operation: Operation
    end: str = ""


@dataclass(frozen=True)
class Kill:
    """ordered: it is wanted, so it is no failure of the engine."""

    reason: str
    ordered: bool = False


Action = (
    Nothing
    | Prepare
    | Pause
    | Flush
    | Check
    | Apply
    | Continue
    | LookAtLoad
    | Empty
    | Release
    | Resume
    | Operate
    | LookAfter
    | Kill
)
