"""How the plug-in ends: exit codes that scripts can rely on, and which failure leads to which."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from ..kube_access.failures import Failure, Forbidden, NotFound, Refused, Unreachable


class ExitCode(IntEnum):
    """Documented in docs/kubectl-plugin.md; a number never changes its meaning."""

    OK = 0
    FAILED = 1  # refused by the API server, or the fleet did not do what was asked
    USAGE = 2  # wrong words on the command line; nothing was sent
    TIMED_OUT = 3  # asked for, and not there yet when --timeout was over; it goes on
    NOT_FOUND = 4
    FORBIDDEN = 5  # not logged in, or without the right
    UNREACHABLE = 6  # no answer from the API server: whether it was done is not known
    INTERRUPTED = 130


class TimedOut(Failure):
    """Asked for, and not there yet."""


@dataclass(frozen=True)
class End:
    """outcome: the name of the end in `-o json`."""

    code: ExitCode
    outcome: str


_ENDS: dict[type[Failure], End] = {
    Failure: End(ExitCode.FAILED, "Failed"),
    Refused: End(ExitCode.FAILED, "Refused"),
    NotFound: End(ExitCode.NOT_FOUND, "NotFound"),
    Forbidden: End(ExitCode.FORBIDDEN, "Forbidden"),
    Unreachable: End(ExitCode.UNREACHABLE, "Unreachable"),
    TimedOut: End(ExitCode.TIMED_OUT, "TimedOut"),
}


def end_of(failure: Failure) -> End:
    return next(_ENDS[kind] for kind in type(failure).__mro__ if kind in _ENDS)
