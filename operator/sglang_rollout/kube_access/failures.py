"""What can come of a call to the API server."""

from __future__ import annotations


class Failure(Exception):
    """message: what went wrong and what to do, for a person."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Refused(Failure):
    """The API server did not take it; its own words."""


class Conflict(Refused):
    """409: the object is not the one any more that the change was meant for."""


class NotFound(Failure):
    """There is none, or none any more."""


class Forbidden(Failure):
    """Not logged in, or without the right."""


class Unreachable(Failure):
    """No answer: whether it was done is not known."""


class Expired(Failure):
    """410: a watch cannot go on from where it was; read anew."""
