"""One event under load: what it costs between pause and continue, what the streams see of it, and whether the weights
are in afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sglang_rollout.transfer.hook_call import Action

from .engine import Engine
from .streams import BEFORE, LEAD, DecodeStreams

RETRACT, IN_PLACE = "retract", "in_place"
NO_EVENT = "no event"
Parts = dict[str, float]
"""Seconds of an event by call, and by part of a call ("apply/copy")."""


@dataclass(frozen=True)
class Row:
    """Seconds. `stall` from the pause's request to the answer of continue. `rate`: tokens a second around it."""

    name: str
    mode: str
    stall: float
    gap: float
    lost: float
    rate: float
    gigabytes_per_second: float
    parts: Parts
    verified: str


@contextmanager
def timed(parts: Parts, name: str) -> Iterator[None]:
    begin = time.monotonic()
    try:
        yield
    finally:
        parts[name] = parts.get(name, 0.0) + time.monotonic() - begin


class Events:
    """`rows` grows with every event. `size`: bytes of the weights."""

    def __init__(self, engine: Engine, streams: DecodeStreams, size: int) -> None:
        self.engine = engine
        self._streams = streams
        self._size = size
        self._sums: dict[str, str] = {}
        self.rows: list[Row] = []

    def nothing(self) -> None:
        """The noise of what the streams tell."""
        self._begin_alike()
        now = time.monotonic()
        seen = self._streams.around(now, now)
        self._keep(Row(NO_EVENT, "", 0.0, seen.gap, seen.lost, seen.rate, 0.0, {}, ""))

    def event(self, name: str, mode: str, body: Callable[[Parts], None], verify: str = "") -> None:
        """Pause, `body`, continue. `verify`: the version that must be in afterwards."""
        self._begin_alike()
        parts: Parts = {}
        begin = time.monotonic()
        with timed(parts, "pause"):
            self.engine.post("/pause_generation", {"mode": mode})
        try:
            body(parts)
        except Exception:
            # Whatever serves now serves no one: let the other measurements have their engine.
            self.engine.end()
            self.engine.post("/continue_generation")
            raise
        with timed(parts, "continue"):
            self.engine.post("/continue_generation", {"torch_empty_cache": False})
        end = time.monotonic()
        seen = self._streams.around(begin, end)
        verified = self.verify(verify) if verify else ""
        moved = self._size / 1e9 / (end - begin) if verify else 0.0
        self._keep(Row(name, mode, end - begin, seen.gap, seen.lost, seen.rate, moved, parts, verified))

    def verify(self, version: str) -> str:
        """By the sums of the parameters, which must be those of the first time this version was in, and others than
        the other version's."""
        digest = self.engine.outside_pause(Action.SUMS).sums_digest
        known = self._sums.setdefault(version, digest)
        others = {other for held, other in self._sums.items() if held != version}
        return "sums equal" if digest == known and digest not in others else "SUMS DIFFER"

    def _begin_alike(self) -> None:
        """All requests anew, so that every event meets prompts and outputs of the same lengths."""
        now = time.monotonic()
        self.engine.post("/abort_request", {"rid": "", "abort_all": True})
        self._streams.wait_begun(now)
        time.sleep(BEFORE + LEAD + 0.1)

    def _keep(self, row: Row) -> None:
        self.rows.append(row)
        parts = " ".join(f"{name}={seconds * 1e3:.1f}" for name, seconds in row.parts.items())
        print(
            f"{row.name} {row.mode}: {row.stall * 1e3:.1f} ms, gap {row.gap * 1e3:.0f} ms, lost {row.lost * 1e3:.1f} "
            f"ms at {row.rate:.0f} tok/s, {row.gigabytes_per_second:.0f} GB/s {row.verified} {parts}",
            flush=True,
        )


def checked(report: Any, action: str) -> Any:
    """The report, if it tells of no problem. Raises RuntimeError."""
    if report.problem:
        raise RuntimeError(f"{action}: {report.problem}")
    return report
