"""How far the weights that are wanted have been prepared: those of the move, and those staged ahead of one. What
takes long goes on in the background; it is followed here, and ended when nobody wants it any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from sglang_rollout.protocol.desired import AgentDesired
from sglang_rollout.protocol.weights import SourceKind, Step, WeightMove

from .background import Background, Preparing
from .engine_http import EngineError
from .engine_watch import EngineWatch
from .journal import JournalFile, StagedNote
from .move_steps import LIVE_KINDS, MoveSteps
from .situation import Progress, Situation, Way

RETRY_SECONDS = 0.5
EARLIER_ENDS = "waiting until an earlier preparation has ended"
NOTES = 4  # of what is staged; the stage holds at most two


class Preparations:
    def __init__(
        self,
        watch: EngineWatch,
        journal: JournalFile,
        moves: MoveSteps,
        clock: Callable[[], float],
        rank: int,
    ) -> None:
        self._watch = watch
        self._journal = journal
        self._moves = moves
        self._clock = clock
        self._rank = rank
        self._changed: Callable[[], None] = lambda: None
        self._background = Background(clock, lambda: self._changed())
        self._drops: set[asyncio.Task[None]] = set()
        self._drops_of = ""  # the last move whose senders were let go
        self.progress: Progress | None = None
        self.ahead: Progress | None = None

    def when_changed(self, tell: Callable[[], None]) -> None:
        self._changed = tell

    async def close(self) -> None:
        await self._background.close()

    @property
    def busy(self) -> bool:
        return self._background.running

    def note(self, **changes: object) -> None:
        if self.progress is not None:
            self.progress = replace(self.progress, **changes)  # type: ignore[arg-type]

    def note_ahead(self, **changes: object) -> None:
        if self.ahead is not None:
            self.ahead = replace(self.ahead, **changes)  # type: ignore[arg-type]

    # --- following what is wanted and what has come of it ---

    def follow(self, desired: AgentDesired, start_id: str) -> None:
        self._forget_ahead(desired)
        before = self.progress
        self.progress = _of(desired.move, before, start_id)
        if before is not None and (self.progress is None or self.progress.move_id != before.move_id):
            self._drop(before)
        self.ahead = _of(desired.prepare, self.ahead, start_id)
        if desired.move is not None and self.progress is not None and self.progress.preparing:
            self.note(**self._news(desired.move, self.progress, ahead=False))
        if desired.prepare is not None and self.ahead is not None and self.ahead.preparing:
            self.note_ahead(**self._news(desired.prepare, self.ahead, ahead=True))

    def end_unwanted(self, situation: Situation) -> None:
        if situation.progress is not None and situation.progress.given_up:
            self._drop(situation.progress)
        state = self._background.state
        if state is None or not state.running:
            return
        wanted = [
            order
            for order, progress in ((situation.move, self.progress), (situation.desired.prepare, self.ahead))
            if order is not None and progress is not None and not progress.given_up and not progress.prepared
        ]
        if not any(_serves(state, order, situation.facts.start_id) for order in wanted):
            self._background.cancel()

    def _news(self, order: WeightMove, progress: Progress, *, ahead: bool) -> dict[str, object]:
        """What is to be noted of a preparation that was begun for `order`, or for the same weights."""
        state = self._background.state
        if state is None or not _serves(state, order, progress.start_id):
            return {"preparing": False}
        if state.running:
            return {"done_bytes": state.done_bytes, "of_bytes": state.of_bytes}
        if state.prepared is None:
            over = {"preparing": False, "tried": state.source}
            late = progress.began_at is not None and self._clock() - progress.began_at > order.timeout_seconds
            if state.passing and not late:
                return over | {"problem": state.error, "retry_at": self._clock() + RETRY_SECONDS}
            return over | {"error": state.error, "refused": state.refused}
        root = state.prepared.root
        if root and progress.way is Way.STAGE:
            self._remember(StagedNote(order.id, order.weights, root, ahead))
        return {
            "preparing": False,
            "prepared": True,
            "checked": False,
            "problem": "",
            "root": root,
            "nonfinite": state.prepared.nonfinite,
            "done_bytes": state.of_bytes,
            "of_bytes": state.of_bytes,
            "began_at": None,
            "prepare_seconds": state.seconds,
        }

    def _remember(self, note: StagedNote) -> None:
        kept = [old for old in self._journal.now.staged if (old.order, old.root) != (note.order, note.root)]
        self._journal.remember(staged=[*kept, note][-NOTES:])

    def _forget_ahead(self, desired: AgentDesired) -> None:
        """What was staged ahead serves the move that follows the order; a later one of the same name may be of other
        bytes."""
        orders = [order for order in (desired.prepare, desired.move) if order is not None]
        wanted = {order.id for order in orders}
        weights = [order.weights for order in orders]

        def goes_on(note: StagedNote) -> bool:
            return note.ahead and (note.order in wanted or note.weights in weights)

        self._journal.remember(staged=[replace(note, ahead=goes_on(note)) for note in self._journal.now.staged])

    def _drop(self, progress: Progress) -> None:
        """A trainer that waits for the engine to take its weights hears that it will not."""
        if progress.way is Way.LIVE and self._drops_of != progress.move_id:
            self._drops_of = progress.move_id
            task = asyncio.get_running_loop().create_task(self._moves.drop(progress.move_id))
            self._drops.add(task)
            task.add_done_callback(self._drops.discard)

    # --- beginning ---

    async def begin(self, order: WeightMove, ahead: bool, situation: Situation) -> None:
        """Raises CheckpointRefused, EngineError, OSError and MalformedMessage."""
        note = self.note_ahead if ahead else self.note
        progress = self.ahead if ahead else self.progress
        assert progress is not None
        began = self._clock()
        note(began_at=began if progress.began_at is None else progress.began_at)
        if self._rank > 0 and order.source.kind in LIVE_KINDS:
            note(prepared=True, problem="", began_at=None)
            return
        way = self._moves.way_of(order)
        if way is Way.STAGE and self._background.ending:
            # It may be about to write where what is found lies.
            raise EngineError(EARLIER_ENDS)
        root = self._moves.found(order) if way is Way.STAGE else ""
        # Read by the engine or found in the stage: nothing is to be waited for.
        if way is Way.ENGINE or root:
            if way is Way.ENGINE:
                await self._moves.check_folder(order)
            seconds = round(self._clock() - began, 4)
            note(way=way, root=root, prepared=True, problem="", began_at=None, prepare_seconds=seconds)
            return
        if order.source.kind in (SourceKind.DISK, SourceKind.KEPT) and not order.source.peers:
            await self._moves.check_folder(order)
        self._start(order, way, situation, ahead=ahead)
        note(way=way, preparing=True, problem="", tried=order.source)

    def _start(self, order: WeightMove, way: Way, situation: Situation, *, ahead: bool) -> None:
        state = self._background.state
        if self._background.running:
            if state is not None and _serves(state, order, situation.facts.start_id):
                return
            self._background.cancel()
            raise EngineError(EARLIER_ENDS)
        opened = self._journal.now.open_apply
        # A move that is to be applied takes the place of one whose apply was begun and failed; nothing else may.
        replaces = not ahead and order.until >= Step.APPLY
        needed = [opened.root] if opened is not None and opened.root and not replaces else []
        work = self._moves.work(order, way, situation.held_root, needed)
        begun = Preparing(order.id, order.weights, order.source, situation.facts.start_id, self._clock())
        self._background.begin(begun, work, order.timeout_seconds)


def _of(order: WeightMove | None, progress: Progress | None, start_id: str) -> Progress | None:
    """The progress of the order on the present engine; made anew when that is another, or when an order that has failed
    names other places to take the weights from."""
    if order is None:
        return None
    if progress is None or (progress.move_id, progress.start_id) != (order.id, start_id):
        return Progress(order.id, start_id)
    failed = progress.error and not progress.refused and not progress.prepared and not progress.failures
    # Not when they are taken back: it would ask the trainer again, who cannot begin anew.
    if failed and order.source.peers and progress.tried is not None and progress.tried != order.source:
        return Progress(order.id, start_id)
    return progress


def _serves(state: Preparing, order: WeightMove, start_id: str) -> bool:
    """Another order of the same weights is served as well, if it does not ask for other bytes: those of another trainer
    are, and what was agreed on with one is for one move."""
    if (state.weights, state.start_id) != (order.weights, start_id):
        return False
    if state.order != order.id and (
        order.source.kind in LIVE_KINDS
        or (order.source.kind is SourceKind.STAGED and order.source.senders != state.source.senders)
    ):
        return False
    roots = {state.source.root, order.source.root, state.prepared.root if state.prepared else ""} - {""}
    return state.order == order.id or len(roots) <= 1
