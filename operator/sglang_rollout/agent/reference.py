"""The manifest of the checkpoint that the running engine was started from: what every later one must equal. Kept on
disk, since that checkpoint may be deleted while the engine runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sglang_rollout.protocol.launch import EngineRecord
from sglang_rollout.protocol.wire import dumps, loads
from sglang_rollout.serving.private_file import write_private

from .checkpoint import Manifest, compare, read_manifest


@dataclass(frozen=True)
class BootManifest:
    start_id: str
    manifest: Manifest


class ReferenceFile:
    """All methods read files: call them from a thread."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def keep(self, start_id: str, folder: Path) -> None:
        """Reads what the engine `start_id` is about to start from. Raises CheckpointRefused and OSError."""
        write_private(self._path, dumps(BootManifest(start_id, read_manifest(folder))))

    def check(self, record: EngineRecord, folder: Path) -> None:
        """Raises CheckpointRefused if the engine of `record` must not load the checkpoint in `folder`, OSError and
        MalformedMessage when that cannot be told now."""
        compare(read_manifest(folder), self._of(record), folder)

    def _of(self, record: EngineRecord) -> Manifest:
        try:
            kept = loads(BootManifest, self._path.read_bytes())
        except FileNotFoundError:
            kept = None
        if kept is None or kept.start_id != record.start_id:
            self.keep(record.start_id, Path(record.order.model_path))
            kept = loads(BootManifest, self._path.read_bytes())
        return kept.manifest
