"""The launcher's requests to start the engine: each is held until the start may be, or for a while."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from sglang_rollout.protocol.launch import LaunchOrder

from .actions import REPEAT_SECONDS
from .actor import Actor
from .engine_report import Waiting
from .group import NotYet, Start, StartGate

HOLD_SECONDS = 20.0


class LaunchRequests:
    """tell: called when what is waited for has changed; wake: when a start was let through."""

    def __init__(
        self,
        gate: StartGate,
        actor: Actor,
        clock: Callable[[], float],
        tell: Callable[[], None],
        wake: Callable[[], None],
    ) -> None:
        self._gate = gate
        self._actor = actor
        self._clock = clock
        self._tell = tell
        self._wake = wake
        self._closed = asyncio.Event()
        self.last_start = ""  # the start that asked last of this process
        self.waiting = Waiting("", "")

    async def hold(self, start_id: str) -> LaunchOrder:
        """What this start runs. Raises NotYet."""
        self.last_start = start_id
        self.waiting = Waiting(start_id, self.waiting.reason)
        deadline = self._clock() + HOLD_SECONDS
        while not self._closed.is_set() and self.waiting.start_id == start_id:
            try:
                start = await self._gate.ask(start_id)
            except NotYet as reason:
                self.waiting = Waiting(self.waiting.start_id, str(reason))
                self._tell()
                if self._clock() >= deadline:
                    raise
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(REPEAT_SECONDS):
                        await self._closed.wait()
                continue
            return self._let_through(start)
        raise NotYet("the agent ends" if self._closed.is_set() else "a later start of the launcher has asked")

    def close(self) -> None:
        """Nothing is held any more: the launcher asks the agent that comes next."""
        self._closed.set()

    def _let_through(self, start: Start) -> LaunchOrder:
        self._actor.remember(joined=start.joined)
        self._actor.save()
        self.waiting = Waiting("", "")
        self._wake()
        return start.order
