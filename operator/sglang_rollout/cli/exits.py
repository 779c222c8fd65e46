"""How the plug-in ends: exit codes that scripts can rely on, and the failures that lead to them."""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar

import click


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


class Failure(click.ClickException):
    """An end that is not OK. message: what went wrong and what to do, for a person."""

    exit_code: ClassVar[int] = ExitCode.FAILED
    outcome: ClassVar[str] = "Failed"


class Refused(Failure):
    """The API server did not take it; its own words."""

    outcome = "Refused"


class NotFound(Failure):
    exit_code = ExitCode.NOT_FOUND
    outcome = "NotFound"


class Forbidden(Failure):
    exit_code = ExitCode.FORBIDDEN
    outcome = "Forbidden"


class Unreachable(Failure):
    exit_code = ExitCode.UNREACHABLE
    outcome = "Unreachable"


class Expired(Failure):
    """410: a watch cannot go on from where it was. Never shown: whoever watches reads anew."""

    exit_code = ExitCode.UNREACHABLE
    outcome = "Unreachable"


class TimedOut(Failure):
    exit_code = ExitCode.TIMED_OUT
    outcome = "TimedOut"
