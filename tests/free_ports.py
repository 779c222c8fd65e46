"""Ports for servers that tests start, each given once: of two that are chosen before either is bound, the kernel may
name the same twice."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

# Below those that the kernel gives to outgoing connections, which may take one before it is bound again.
RANGE = range(12_000, 30_000)

_given: set[int] = set()


def free_port() -> int:
    """Free on all addresses when it was looked at, and never one that this process has given before."""
    while True:
        port = random.choice(RANGE)
        if port in _given:
            continue
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            _given.add(port)
            return port
