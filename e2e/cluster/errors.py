"""The one error that the cluster tools raise: a sentence that says what failed and what to do about it."""

from __future__ import annotations


class ClusterError(Exception):
    """Something the tools needed did not happen; the message is for the person at the terminal."""
