"""An engine that the operator orders to start again: what its requests lack is made first, for a while, as they would
be lost with the process. One that serves nothing worth finishing is killed at once."""

from __future__ import annotations

from sglang_rollout.protocol.report import EngineState
from sglang_rollout.protocol.weights import PauseMode

from . import residency
from .actions import Action, Empty, Kill, LookAtLoad, Nothing, Pause
from .situation import Situation, weaker

ORDERED = "the operator ordered a restart"
LINGER_SECONDS = 1.0  # a request that was on its way when the last router was told still arrives
ABORT_SECONDS = 15.0  # for what is left to be gone when its time is over


def next_step(situation: Situation) -> Action | None:
    """None when no restart of this process is ordered. An order that could not be carried out is planned again."""
    if not situation.restart_ordered:
        return None
    if not _has_something_to_finish(situation):
        return Kill(ORDERED, ordered=True)
    if waiting := residency.empty_by_itself(situation, situation.drain_seconds):
        return waiting
    emptying, now = situation.emptying, situation.now
    if emptying is None or emptying.emptied:
        return Kill(ORDERED, ordered=True)
    if emptying.requests and now < emptying.began_at + situation.drain_seconds + ABORT_SECONDS:
        # Whoever waits for what is left hears of its end now, and not by a connection that is cut.
        return Pause(PauseMode.RETRACT) if weaker(situation.pause, PauseMode.RETRACT) else Empty()
    if not emptying.requests and situation.pause is None and now < emptying.began_at + LINGER_SECONDS:
        next_look = emptying.looked_at + residency.LOOK_SECONDS
        return LookAtLoad() if now >= next_look else Nothing("starts again soon", next_look)
    return Kill(ORDERED, ordered=True)


def _has_something_to_finish(situation: Situation) -> bool:
    """It generates, or could, by weights of which others may have tokens."""
    whole = not (situation.dirty or situation.unsure or situation.shut)
    serves = situation.facts.state is EngineState.SERVING and situation.rank == 0
    return serves and whole and situation.desired.restart_drains
