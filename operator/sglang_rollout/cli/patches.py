"""The merge patches that the verbs send: exactly the fields of spec that a verb is about."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

Patch = dict[str, Any]

TAGS = ("weights", "kvCache", "cudaGraph")
"""Fields of spec.memory that say where something is."""


def execution(state: str, pause_mode: str | None = None) -> Patch:
    """Running or Paused. pause_mode: absent, as it is."""
    return {"execution": {"state": state, **({"pauseMode": pause_mode} if pause_mode else {})}}


def memory(residency: str, tags: Iterable[str], state: str | None = None) -> Patch:
    """Resident or Released, for these tags; none of them: for all. state: of execution, in the same step."""
    chosen = [tag for tag in TAGS if tag in set(tags)] or list(TAGS)
    return {"memory": dict.fromkeys(chosen, residency), **(execution(state) if state else {})}


def disk_weights(version: str, path: str) -> Patch:
    """Other weights from a folder; the members of other source types go."""
    source = {"type": "Disk", "disk": {"path": path}, "distributed": None, "colocated": None}
    return {"weights": {"version": version, "source": source}}


def weight_check(request_id: str, action: str) -> Patch:
    return {"weightCheck": {"requestID": request_id, "action": action}}


def profile(request_id: str, steps: int) -> Patch:
    """steps is always sent: a request may not inherit it from the one before."""
    return {"profile": {"requestID": request_id, "steps": steps}}


def flush_cache(request_id: str) -> Patch:
    return {"flushCache": {"requestID": request_id}}


def abort_requests(request_id: str) -> Patch:
    return {"abortRequests": {"requestID": request_id}}


def restart(request_id: str) -> Patch:
    return {"restart": {"requestID": request_id}}


def new_request_id(now: datetime, token: str | None = None) -> str:
    """Sorts by time and is new even when two people ask in the same second. token: four letters, or random."""
    return f"{now.astimezone(UTC):%Y%m%dT%H%M%SZ}-{token or secrets.token_hex(2)}"


def leaves(patch: Mapping[str, Any], prefix: str = "spec") -> list[tuple[str, Any]]:
    """Dotted path and new value of each field that a patch sets; what it takes away is left out."""
    found: list[tuple[str, Any]] = []
    for key, value in patch.items():
        if isinstance(value, Mapping):
            found += leaves(value, f"{prefix}.{key}")
        elif value is not None:
            found.append((f"{prefix}.{key}", value))
    return found


def difference(spec: Mapping[str, Any], patch: Mapping[str, Any], prefix: str = "spec") -> str:
    """The first field that is not as `patch` left it, as a phrase; empty: all are."""
    for key, wanted in patch.items():
        present = spec.get(key)
        if isinstance(wanted, Mapping):
            below = present if isinstance(present, Mapping) else {}
            if found := difference(below, wanted, f"{prefix}.{key}"):
                return found
        elif present != wanted:
            return f"{prefix}.{key} is {'gone' if present is None else present}"
    return ""
