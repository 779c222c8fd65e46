"""Steps told to the person who waits: what is being done, and how long it took."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_started = time.monotonic()
_lock = threading.Lock()


def say(message: str) -> None:
    """One line on standard error, after the minutes and seconds since the tools started."""
    minutes, seconds = divmod(int(time.monotonic() - _started), 60)
    with _lock:
        print(f"[{minutes:02d}:{seconds:02d}] {message}", file=sys.stderr, flush=True)


@contextmanager
def step(title: str) -> Iterator[None]:
    """Tell that `title` begins, and that it ended or failed, with its duration."""
    begin = time.monotonic()
    say(f"{title} ...")
    try:
        yield
    except BaseException:
        say(f"{title}: FAILED after {time.monotonic() - begin:.0f} s")
        raise
    say(f"{title}: {time.monotonic() - begin:.1f} s")
