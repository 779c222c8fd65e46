"""A member of an engine's group whose rank 0 started again can never join it: it starts again as well."""

from __future__ import annotations

import asyncio
import logging

from sglang_rollout.protocol.report import EngineState

from .actor import Actor
from .engine_watch import EngineWatch
from .group import NotYet, StartGate
from .kills import Kills

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0


class Rank0Watch:
    """For ranks after the first."""

    def __init__(self, watch: EngineWatch, actor: Actor, gate: StartGate, kills: Kills) -> None:
        self._watch = watch
        self._actor = actor
        self._gate = gate
        self._kills = kills

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            joined, facts = self._actor.journal.joined, self._watch.facts
            if joined is None or joined.start_id != facts.start_id or facts.state is EngineState.ABSENT:
                continue
            try:
                found = await self._gate.rank0(joined.group)
            except NotYet as error:
                log.info("%s", error)
                continue
            if found.start_id and found.start_id != joined.rank0_start_id:
                self._kills.kill("rank 0 of its engine started again", ordered=True)
