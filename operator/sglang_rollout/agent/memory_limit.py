"""How much memory this container may still take. Pages of shared memory count as its own from when it makes them, and
going beyond the limit kills it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryLimit:
    """In bytes. used: without what the kernel takes back by itself."""

    limit: int
    used: int


def memory_limit(folder: Path = CGROUP) -> MemoryLimit | None:
    """None where there is no limit, or no cgroup of version 2 that would tell it."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        current = int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        if limit == "max":
            return None
        return MemoryLimit(int(limit), current - int(stat["active_file"]) - int(stat["inactive_file"]))
    except (OSError, ValueError, KeyError):
        return None
