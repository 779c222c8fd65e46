"""One worker at a time: file locks with a deadline, so that two callers do not build or start the same thing."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from e2e.cluster.errors import ClusterError
from e2e.cluster.progress import say


@contextmanager
def exclusive(path: Path, what: str, *, timeout: float) -> Iterator[None]:
    """Hold the lock file `path`; the kernel releases it when this process ends, however it ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as stream:
        deadline = time.monotonic() + timeout
        told = False
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ClusterError(f"{what}: another process has held {path} for {timeout:.0f} s") from None
                if not told:
                    say(f"{what}: waiting for another process that does the same")
                    told = True
                time.sleep(0.5)
        yield
