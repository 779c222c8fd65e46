"""What a process uses, from /proc: CPU seconds and resident memory."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Usage:
    """at: monotonic seconds. cpu: seconds of all threads since the process began. rss, peak: bytes."""

    at: float
    cpu: float
    rss: int
    peak: int


def of(pid: int) -> Usage:
    """Raises FileNotFoundError when the process is gone."""
    folder = Path("/proc") / str(pid)
    return parse(time.monotonic(), (folder / "stat").read_text(), (folder / "status").read_text())


def parse(at: float, stat: str, status: str) -> Usage:
    """From the texts of /proc/PID/stat and /proc/PID/status (proc(5))."""
    fields = stat.rpartition(")")[2].split()
    user, system = int(fields[11]), int(fields[12])
    sizes = {line.partition(":")[0]: line.split()[1] for line in status.splitlines() if line.startswith("Vm")}
    return Usage(at, (user + system) / _TICKS, int(sizes["VmRSS"]) * 1024, int(sizes["VmHWM"]) * 1024)


def cpu_percent(before: Usage, after: Usage) -> float:
    """Of one core, between the two."""
    return 100.0 * (after.cpu - before.cpu) / (after.at - before.at)


def mebibytes(values: Sequence[int]) -> list[float]:
    return [value / 2**20 for value in values]
