"""Which memory to release or resume next, in the only safe order. A wrong call kills SGLang: a release while a request
is running, the release of what is released, the resume of what is not.

Release: let requests end, unpaused (a retract pause would hold them for ever), then pause, abort what is left, see that
nothing is, release graphs and cache, then weights. Resume: weights, cache, graphs; the pause ends by `execution` alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from sglang_rollout.protocol.memory import MemoryTag
from sglang_rollout.protocol.weights import PauseMode

from .actions import Action, Continue, Empty, Kill, LookAtLoad, Nothing, Pause, Release, Resume
from .situation import Situation, weaker

LOOK_SECONDS = 0.1  # between two looks at what still runs

_RELEASES = ((MemoryTag.CUDA_GRAPH, MemoryTag.KV_CACHE), (MemoryTag.WEIGHTS,))
_RESUMES = (MemoryTag.WEIGHTS, MemoryTag.KV_CACHE, MemoryTag.CUDA_GRAPH)


def unknown(situation: Situation) -> Action | None:
    """SGLang does not tell what it has released, and either guess may kill it at a worse time."""
    if not situation.unsure:
        return None
    return Kill("a call that releases or resumes memory had no answer: what it holds is not known")


def next_step(situation: Situation) -> Action | None:
    """None when the memory is as ordered, or must wait."""
    order = situation.desired.memory
    if order is None:
        return None
    wanted = frozenset(order.released)
    for tag in _RESUMES:
        if tag in situation.released - wanted:
            return Resume((tag,))
    missing = wanted - situation.released
    if not missing or refusal(situation):
        return None
    if not situation.shut and (waiting := empty_by_itself(situation, order.drain_seconds)):
        return waiting
    if weaker(situation.pause, PauseMode.RETRACT):
        return Pause(PauseMode.RETRACT)
    if situation.emptying is None or not situation.emptying.emptied:
        return Empty()
    return next(Release(tags) for group in _RELEASES if (tags := tuple(tag for tag in group if tag in missing)))


def empty_by_itself(situation: Situation, seconds: float) -> Action | None:
    """Lets requests end, for so long. None when no request is left, or the time for that is over, or it was seen
    already. Counts stand still under a pause, so they are of its beginning."""
    emptying, now = situation.emptying, situation.now
    if situation.pause is PauseMode.ABORT:
        return None
    if emptying is None:
        return LookAtLoad()
    if emptying.emptied or not emptying.requests or now >= emptying.began_at + seconds:
        return None
    if situation.pause is not None:
        return Continue()
    if now >= emptying.looked_at + LOOK_SECONDS:
        return LookAtLoad()
    return Nothing(f"waiting for {emptying.requests} requests to end", emptying.looked_at + LOOK_SECONDS)


def refusal(situation: Situation) -> str:
    """Why what is ordered is not released; empty when nothing stands against it."""
    order = situation.desired.memory
    missing = frozenset(order.released) - situation.released if order else frozenset()
    if not missing:
        return ""
    if not situation.facts.launch.memory_saver:
        return f"cannot release {names(missing)}: the engine was started without --enable-memory-saver"
    if situation.moving and MemoryTag.WEIGHTS not in situation.released:
        return f"releases {names(missing)} when the weight move is over"
    return ""


def names(tags: Iterable[MemoryTag]) -> str:
    return ", ".join(sorted(tags))
