"""Programs that end with the one that started them, however that ends."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def ends_with_parent(number: signal.Signals) -> Callable[[], None]:
    """For subprocess's preexec_fn (Linux): the child is sent `number` when the thread that started it ends."""
    library = ctypes.CDLL(None)
    return lambda: library.prctl(_PR_SET_PDEATHSIG, int(number)) and None


def terminated_as_interrupted() -> None:
    """From now on SIGTERM raises KeyboardInterrupt, so that what this process has started is ended by its clean-up."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
