"""What the checkpoint holds that the running engine was started from: every later one must have the same tensors. Kept
in a file, since that checkpoint may be deleted while the engine runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sglang_rollout.protocol.launch import EngineRecord
from sglang_rollout.protocol.wire import dumps, loads
from sglang_rollout.serving.private_file import write_private

from .checkpoint import Checkpoint, compare, read_checkpoint


@dataclass(frozen=True)
class BootCheckpoint:
    start_id: str
    checkpoint: Checkpoint


class ReferenceFile:
    """All methods read files: call them from a thread."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def keep(self, start_id: str, folder: Path) -> Checkpoint:
        """Reads what the engine `start_id` is about to start from. Raises CheckpointRefused and OSError."""
        checkpoint = read_checkpoint(folder)
        write_private(self._path, dumps(BootCheckpoint(start_id, checkpoint)))
        return checkpoint

    def check(self, record: EngineRecord, folder: Path) -> None:
        """Raises CheckpointRefused if the engine of `record` must not load the checkpoint in `folder`, OSError and
        MalformedMessage when that cannot be told now."""
        compare(read_checkpoint(folder), self.running(record), folder)

    def running(self, record: EngineRecord) -> Checkpoint:
        """What the engine of `record` was started from. Raises as check()."""
        try:
            kept = loads(BootCheckpoint, self._path.read_bytes())
        except FileNotFoundError:
            kept = None
        if kept is None or kept.start_id != record.start_id:
            return self.keep(record.start_id, Path(record.order.model_path))
        return kept.checkpoint
