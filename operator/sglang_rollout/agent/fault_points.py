"""Named points at which tests let the agent end or stand still, or its engine be killed; in the environment, so that it
is the shipped agent that is tested. Without the variable nothing happens there."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

log = logging.getLogger(__name__)

ENV_FAULTS = "SGLANG_ROLLOUT_FAULTS"
"""<point>=<exit|hang|hold|kill-engine>[:n], several divided by commas; n: the n-th time that the point is passed, else
the first. Or @<file>: the words are in that file, which may come and change at any time. A word is taken out of it
before it acts, so that an agent that starts again passes; `hold` stands still until somebody takes the word out, and
<file>.held has the point meanwhile. Points: <step>:before and <step>:after of every step (agent/actions.py),
apply:begun, apply:written and apply:labelled within an apply, stage:begin, stage:mid and stage:end of a preparation."""

KINDS = ("exit", "hang", "hold", "kill-engine")
EXIT_CODE = 86
LOOK_SECONDS = 0.05

Words = dict[str, tuple[str, int]]
"""Kind and how many passes are left, by point."""


@dataclass
class FaultPoints:
    """file: where words are besides `wanted`. engine_pid: of the process to be killed, 0 for none."""

    wanted: Words = field(default_factory=dict)
    file: Path | None = None
    engine_pid: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> FaultPoints:
        """Raises ValueError."""
        text = environment.get(ENV_FAULTS, "")
        return cls(file=Path(text[1:])) if text.startswith("@") else cls(_parse(text))

    async def at(self, point: str) -> None:
        kind = self._due(point)
        if kind == "hang":
            await asyncio.Event().wait()
        while kind == "hold" and self._holds(point):  # noqa: ASYNC110 - another process writes the file
            await asyncio.sleep(LOOK_SECONDS)

    def at_once(self, point: str) -> None:
        """For a thread of its own, which stands still."""
        kind = self._due(point)
        if kind == "hang":
            time.sleep(3600)
        while kind == "hold" and self._holds(point):
            time.sleep(LOOK_SECONDS)

    def _due(self, point: str) -> str:
        if not self.wanted and self.file is None:
            return ""
        with self._lock:
            words = self._words()
            kind, left = words.get(point, ("", 0))
            if not kind or left < 1:
                return ""
            if kind != "hold":
                words[point] = (kind, left - 1)
                self._save({name: word for name, word in words.items() if word[1] > 0})
        if left != 1:
            return ""
        log.warning("fault at %s: %s", point, kind)
        if kind == "exit":
            os._exit(EXIT_CODE)
        if kind == "kill-engine" and self.engine_pid:
            os.killpg(self.engine_pid, signal.SIGKILL)
        return kind

    def _holds(self, point: str) -> bool:
        with self._lock:
            held = point in self._words()
        if self.file is not None:
            mark = self.file.with_name(f"{self.file.name}.held")
            mark.write_text(point) if held else mark.unlink(missing_ok=True)
        return held

    def _words(self) -> Words:
        if self.file is None:
            return self.wanted
        try:
            return _parse(self.file.read_text().strip())
        except FileNotFoundError:
            return {}

    def _save(self, words: Words) -> None:
        if self.file is None:
            self.wanted = words
            return
        beside = self.file.with_name(f"{self.file.name}.new")
        beside.write_text(",".join(f"{point}={kind}:{left}" for point, (kind, left) in words.items()))
        beside.rename(self.file)


def _parse(text: str) -> Words:
    """Raises ValueError."""
    found: Words = {}
    for word in filter(None, text.split(",")):
        point, _, fault = word.partition("=")
        kind, _, count = fault.partition(":")
        if kind not in KINDS:
            raise ValueError(f"{ENV_FAULTS}: {word!r} is no <point>=<{'|'.join(KINDS)}>[:n]")
        found[point] = (kind, int(count or 1))
    return found
