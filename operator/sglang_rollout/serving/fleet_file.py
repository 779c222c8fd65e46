"""The fleet's ConfigMap as mounted into a pod; it is read again whenever the kubelet has replaced it."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from sglang_rollout.protocol.fleet import FleetConfig
from sglang_rollout.protocol.wire import MalformedMessage, loads

log = logging.getLogger(__name__)


class FleetFileUnreadable(Exception):
    """The mounted fleet file is absent or malformed and no earlier content is known."""


class FleetFile:
    """The present content of a fleet file. A file that became malformed or vanished leaves the last good content
    in force: the kubelet replaces it in one step, so that is a fault of somebody else's, not a new will."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._config: FleetConfig | None = None

    def read(self) -> FleetConfig:
        """Raises FleetFileUnreadable."""
        try:
            found = self._path.stat()
            mark = (found.st_ino, found.st_mtime_ns, found.st_size)
            if mark != self._seen:
                self._config = loads(FleetConfig, self._path.read_bytes())
                self._seen = mark
        except (OSError, MalformedMessage) as error:
            if self._config is None:
                raise FleetFileUnreadable(
                    f"cannot read the fleet's settings in {os.fspath(self._path)}: {error}"
                ) from error
            log.warning("%s: %s; the settings read before stay in force", self._path, error)
        assert self._config is not None
        return self._config
