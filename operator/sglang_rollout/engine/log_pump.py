"""Passes the engine's log on, line by line, without its keys, and keeps the last lines."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO

KEPT_LINES = 200
MAX_LINE_BYTES = 1 << 20

# A rank other than 0 that could not load new weights says so in the log only: /update_weights_from_disk answers for
# rank 0 (SGLang 0.5.23, model_executor/model_runner_components/weight_updater.py).
_SILENT_LOAD_FAILURE = re.compile(
    rb"\bTP[1-9]\d*\b.*Failed to (?:get weights iterator|update weights|get model loader)"
)


class LogPump(threading.Thread):
    """Copies `source` to `sink` until it ends. `on_silent_load_failure` is called with a line that says that a
    rank holds other weights than rank 0 says."""

    def __init__(
        self,
        source: IO[bytes],
        sink: IO[bytes],
        secrets: Sequence[str],
        on_silent_load_failure: Callable[[str], None] = lambda line: None,
    ) -> None:
        super().__init__(name="log-pump", daemon=True)
        self._source = source
        self._sink = sink
        self._secrets = [secret.encode() for secret in secrets if secret]
        self._on_silent_load_failure = on_silent_load_failure
        self._kept: deque[str] = deque(maxlen=KEPT_LINES)

    def lines(self) -> list[str]:
        return list(self._kept)

    def run(self) -> None:
        with self._source:
            while raw := self._source.readline(MAX_LINE_BYTES):
                line = self._redacted(raw)
                text = line.decode(errors="replace").rstrip()
                self._kept.append(text)
                self._sink.write(line)
                self._sink.flush()
                if _SILENT_LOAD_FAILURE.search(line):
                    self._on_silent_load_failure(text)

    def _redacted(self, line: bytes) -> bytes:
        for secret in self._secrets:
            line = line.replace(secret, b"***")
        return line
