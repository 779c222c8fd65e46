"""Brings the weights of a move into the stage, from wherever the move says that they come; the engine sees nothing of
it. What lies there already is used again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp

from sglang_rollout.protocol.weights import SourceKind, WeightMove
from sglang_rollout.transfer.checkpoint_files import CheckpointUnusable
from sglang_rollout.transfer.digests import ALGORITHMS
from sglang_rollout.transfer.disk_reader import Reading, StagingStopped, stage_checkpoint
from sglang_rollout.transfer.intake import Intake, IntakeFailed, IntakeRefused, TrainerIntake
from sglang_rollout.transfer.manifest import Manifest, ManifestRefused
from sglang_rollout.transfer.outlast import outlast
from sglang_rollout.transfer.peer_pull import PeersFailed, pull
from sglang_rollout.transfer.stage import BytesRefused, Stage
from sglang_rollout.transfer.stage_index import StageUnusable

from .background import NotPrepared, Prepared, Progressed
from .checkpoint import Checkpoint, CheckpointRefused
from .fault_points import FaultPoints
from .journal import StagedNote
from .settings import AgentSettings
from .stage_room import StageRoom

log = logging.getLogger(__name__)


class Staging:
    """Fills slots of the stage. `room.stage` must be there."""

    def __init__(
        self, settings: AgentSettings, room: StageRoom, session: aiohttp.ClientSession, faults: FaultPoints
    ) -> None:
        self.room = room
        self._settings = settings
        self._session = session
        self._faults = faults
        self._intake: TrainerIntake | None = None
        self._warming: asyncio.Task[None] | None = None

    def warm(self) -> None:
        """Starts what receives from trainers ahead of the first of them: it takes seconds to be ready. Once; one that
        ends is started again by the next that sends."""
        if self._warming is None and self.room.stage is not None:
            self._warming = asyncio.create_task(self._warm(self._the_intake()))

    @staticmethod
    async def _warm(intake: TrainerIntake) -> None:
        try:
            await intake.warm()
        except IntakeFailed as error:
            log.warning("nothing can be received from a trainer: %s", error)

    def _the_intake(self) -> TrainerIntake:
        if self._intake is None:
            self._intake = TrainerIntake(self.room.folder, python=self._settings.torch_python)
        return self._intake

    async def close(self) -> None:
        if self._warming is not None:
            self._warming.cancel()
            await asyncio.gather(self._warming, return_exceptions=True)
        if self._intake is not None:
            await self._intake.close()
        self.room.close()

    def found(self, move: WeightMove, notes: Sequence[StagedNote]) -> str:
        """The root of what is staged already and is what the move asks for; "" when nothing is."""
        root = move.source.root
        if root:
            return root if self.room.holds(root) else ""
        # The label of what a trainer sends says nothing of its bytes: another one may have staged others by it.
        ahead = move.source.kind is not SourceKind.STAGED
        for note in notes:
            serves = note.order == move.id or (note.ahead and ahead)
            if note.weights == move.weights and serves and self.room.holds(note.root):
                return note.root
        return ""

    async def bring(self, move: WeightMove, running: Checkpoint, slot: str, key: str, progress: Progressed) -> Prepared:
        """Raises CheckpointRefused, OSError, and other exceptions that say what went wrong this time."""
        stage = self.room.stage
        assert stage is not None
        await self._faults.at("stage:begin")

        def progressed(done: int, of: int) -> None:
            self._faults.at_once("stage:mid")
            progress(done, of)

        try:
            prepared = await self._bring(move, running, stage, slot, key, progressed)
        except (CheckpointUnusable, BytesRefused, ManifestRefused) as refusal:
            raise CheckpointRefused(str(refusal)) from refusal
        await self._faults.at("stage:end")
        try:
            await asyncio.to_thread(self.room.layout, prepared.root)  # read now, and not in the pause
        except StageUnusable as error:
            raise NotPrepared(f"it was staged and is not there: {error}") from error
        return prepared

    async def _bring(
        self, move: WeightMove, running: Checkpoint, stage: Stage, slot: str, key: str, progress: Progressed
    ) -> Prepared:
        source = move.source
        if source.kind is SourceKind.STAGED and not (source.root and source.peers):
            return await self._receive(move, running, slot, progress)
        problems: list[str] = []
        if source.root and source.peers:
            try:
                seconds = move.timeout_seconds
                manifest = await pull(
                    self._session, source.peers, source.root, move.weights.version, key, stage, slot, progress, seconds
                )
                return Prepared(manifest.root)
            except PeersFailed as error:
                problems.append(str(error))
        if source.kind is not SourceKind.STAGED and move.weights.path:
            return await self._read(move, running, stage, slot, progress)
        where = "" if source.peers else "no peer is known that keeps it, "
        problems.append(f"{where}and it lies in no folder")
        raise NotPrepared(f"version {move.weights.version!r} is not to be had: {'; '.join(problems)}")

    async def _receive(self, move: WeightMove, running: Checkpoint, slot: str, progress: Progressed) -> Prepared:
        source = move.source
        intake = Intake(
            transaction=move.id,
            version=move.weights.version,
            senders=tuple(source.senders),
            transport=source.transport,
            members=source.members,
            epoch=source.epoch,
            slot=slot,
            algorithm=next(iter(ALGORITHMS)),
            reference=running.by_name,
            tied_names=running.tied_names,
            allow_nonfinite=source.allow_nonfinite,
            timeout_seconds=move.timeout_seconds,
            receiver=self._settings.pod_name or self._settings.pod_uid,
        )
        try:
            received = await self._the_intake().receive(intake, progress)
        except IntakeRefused as refusal:
            raise CheckpointRefused(str(refusal)) from refusal
        except IntakeFailed as error:
            raise NotPrepared(str(error)) from error
        return Prepared(received.root, received.nonfinite)

    async def _read(
        self, move: WeightMove, running: Checkpoint, stage: Stage, slot: str, progress: Progressed
    ) -> Prepared:
        stop = threading.Event()
        counted: list[int] = []
        reading = Reading(
            folder=Path(move.weights.path),
            version=move.weights.version,
            algorithm=next(iter(ALGORITHMS)),
            reference=running.by_name,
            tied_names=running.tied_names,
            bucket_bytes=self._settings.stage.bucket_bytes,
            allow_nonfinite=move.source.allow_nonfinite,
            progress=progress,
            stopped=stop.is_set,
            counted=counted.append,
        )
        manifest = await _in_thread(lambda: stage_checkpoint(stage, slot, reading), stop)
        if move.source.root and manifest.root != move.source.root:
            # Roots tell how the tensors were divided, too: another one does not prove other bytes.
            log.warning(
                "%s has root %s, the version is known as %s", move.weights.path, manifest.root, move.source.root
            )
        return Prepared(manifest.root, sum(counted))


async def _in_thread(work: Callable[[], Manifest], stop: threading.Event) -> Manifest:
    """When it is cancelled, `stop` is set and the thread's end is waited for: until then the slot is not free."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        stop.set()
        await outlast(task)
        with contextlib.suppress(StagingStopped, CheckpointUnusable, BytesRefused, OSError):
            task.result()
        raise
