"""What the resource says of a version that was asked for: pure functions over the object as the API server gives it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Object = Mapping[str, Any]

_VERSION = re.compile(r"[!-~]([ -~]*[!-~])?")
MAX_VERSION = 128
NOT_OURS = 1 << 62  # a generation: another rank asks for the version, when it does


@dataclass(frozen=True)
class EngineOutcome:
    """One engine at the end. current: it serves the version and is in the router."""

    name: str
    version: str
    current: bool
    message: str = ""


@dataclass(frozen=True)
class Verdict:
    """stall_seconds: the longest time that an engine generated nothing, 0 where not known."""

    outcome: Literal["Committed", "Prepared", "Failed"]
    sentence: str = ""
    serving: str = ""
    root: str = ""
    stall_seconds: float = 0.0
    engines: tuple[EngineOutcome, ...] = field(default=())


def weights_status(fleet: Object) -> Mapping[str, Any]:
    found: Mapping[str, Any] = (fleet.get("status") or {}).get("weights") or {}
    return found


def serving(fleet: Object) -> str:
    return str(weights_status(fleet).get("version") or "")


def why_not(fleet: Object, version: str) -> str:
    """Why this version must not be published now; empty: it may."""
    name = fleet["metadata"]["name"]
    spec, status = fleet.get("spec") or {}, weights_status(fleet)
    if len(version) > MAX_VERSION or not _VERSION.fullmatch(version) or version == "default":
        return (
            f"{version!r} is no label of weights: use 1 to {MAX_VERSION} printable characters without a space at "
            "either end, and not 'default'"
        )
    if fleet["metadata"].get("deletionTimestamp"):
        return f"fleet {name} is being deleted"
    if spec.get("control") == "External":
        return (
            f"fleet {name} has control External: move its weights through the agents, as docs/external-control.md says"
        )
    known = {str(entry.get("version")) for entry in status.get("history") or ()}
    asked = (spec.get("weights") or {}).get("version")
    if version in known or version in (asked, status.get("version")):
        return f"fleet {name} knows version {version} already: a version means one set of bytes, choose another label"
    if (open_ := _open_transaction(fleet)) and not _failed(status):
        return (
            f"fleet {name} is moving to version {open_} now, for the trainer at {_senders(fleet)}: wait until it is "
            "done, or stop that trainer"
        )
    if not (fleet.get("status") or {}).get("engines"):
        return f"fleet {name} has no engines: raise spec.replicas and wait until they are ready"
    return ""


def publish_verdict(fleet: Object, version: str, generation: int) -> Verdict | None:
    """None: not over yet. generation: of the resource once it asked for this version; what the operator says of an
    older one is of an earlier attempt."""
    status = weights_status(fleet)
    transaction = status.get("transaction") or {}
    ours = transaction.get("version") == version and _answers(fleet, generation)
    now = serving(fleet)
    if fleet["metadata"].get("deletionTimestamp"):
        return Verdict("Failed", "the fleet is being deleted", now)
    if ours and now == version and transaction.get("completedAt"):
        return Verdict(
            "Committed",
            serving=now,
            root=str(transaction.get("root") or ""),
            stall_seconds=float(transaction.get("stallSeconds") or 0),
            engines=outcomes(fleet, version),
        )
    if ours and _failed(status):
        return Verdict("Failed", str(transaction.get("message") or "it failed"), now, engines=outcomes(fleet, version))
    asked = ((fleet.get("spec") or {}).get("weights") or {}).get("version")
    if asked != version and fleet["metadata"].get("generation", 0) >= generation:
        if ours and transaction.get("decision") == "Commit":
            return None
        return Verdict("Failed", f"somebody else has asked for version {asked or 'of model.path'} meanwhile", now)
    return None


def prepare_verdict(fleet: Object, version: str, generation: int) -> Verdict | None:
    """As publish_verdict()."""
    status = weights_status(fleet)
    prepared = status.get("prepared") or {}
    if fleet["metadata"].get("deletionTimestamp"):
        return Verdict("Failed", "the fleet is being deleted", serving(fleet))
    if prepared.get("version") != version:
        asked = (((fleet.get("spec") or {}).get("weights") or {}).get("prepare") or {}).get("version")
        return None if asked == version else Verdict("Failed", f"somebody else prepares {asked}", serving(fleet))
    if not _answers(fleet, generation):
        return None
    if prepared.get("failedAt"):
        return Verdict("Failed", str(prepared.get("message") or "it failed"), serving(fleet))
    if prepared.get("root") and prepared.get("engines") and not prepared.get("message"):
        return Verdict("Prepared", serving=serving(fleet), root=str(prepared["root"]))
    return None


def _answers(fleet: Object, generation: int) -> bool:
    """Whether the operator has seen the resource of that generation."""
    return generation == NOT_OURS or int((fleet.get("status") or {}).get("observedGeneration") or 0) >= generation


def outcomes(fleet: Object, version: str) -> tuple[EngineOutcome, ...]:
    return tuple(
        EngineOutcome(
            str(one.get("name")),
            str(one.get("weightVersion") or ""),
            bool(one.get("routable")) and one.get("weightVersion") == version,
            str(one.get("message") or ""),
        )
        for one in (fleet.get("status") or {}).get("engines") or ()
    )


def progress(fleet: Object) -> str:
    """What the fleet is doing with the version that is asked for, for an error that says why it is not done."""
    status = weights_status(fleet)
    transaction = status.get("transaction") or {}
    if not transaction:
        return "the operator has not begun: does it run?"
    counts = f"{transaction.get('prepared', 0)} engines prepared, {transaction.get('committed', 0)} committed"
    message = f"; {transaction['message']}" if transaction.get("message") else ""
    return f"{status.get('phase', 'Idle')}, {counts}{message}"


def _failed(status: Mapping[str, Any]) -> bool:
    return bool(status.get("phase") == "Failed" or (status.get("transaction") or {}).get("decision") == "Abort")


def _open_transaction(fleet: Object) -> str:
    status = weights_status(fleet)
    transaction = status.get("transaction") or {}
    if transaction and not transaction.get("completedAt"):
        return str(transaction.get("version"))
    asked = str(((fleet.get("spec") or {}).get("weights") or {}).get("version") or "")
    target = str(status.get("targetVersion") or "")
    # Asked for, and not seen by the operator yet.
    return asked if asked and asked not in (target, status.get("version")) else ""


def _senders(fleet: Object) -> str:
    transaction = weights_status(fleet).get("transaction") or {}
    told = (transaction.get("source") or {}).get("senders") or []
    source = ((fleet.get("spec") or {}).get("weights") or {}).get("source") or {}
    asked = (source.get("distributed") or source.get("colocated") or {}).get("senders") or []
    return ", ".join(told or [f"{one['address']}:{one['port']}" for one in asked]) or "another place"
