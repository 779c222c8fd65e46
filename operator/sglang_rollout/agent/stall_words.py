"""What the time of a pause went into, for the log: whoever finds a pause long asks this first."""

from __future__ import annotations

from collections.abc import Mapping


def stall_words(stall: float, spent: Mapping[str, float]) -> str:
    """stall: seconds from pause to continue. spent: seconds of them by the engine's routes."""
    parts = [f"{path.lstrip('/')} {seconds * 1e3:.1f}" for path, seconds in spent.items()]
    rest = stall - sum(spent.values())
    return f"{stall * 1e3:.1f} ms: " + ", ".join([*parts, f"the agent and others {max(rest, 0.0) * 1e3:.1f}"])
