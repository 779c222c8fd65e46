"""What the resource says of a version that was asked for: pure functions over the object as the API server gives it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .labels import asked_version, has_failed, is_seen, known_labels, senders_of, weights_status

Object = Mapping[str, Any]


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


@dataclass(frozen=True)
class Attempt:
    """Which of the operator's words are of this attempt and not of an earlier one by the same label. generation: of the
    resource that asks for it; 0: another rank asks. over: what had ended before this rank began."""

    version: str
    generation: int = 0
    over: frozenset[str] = frozenset()

    @classmethod
    def by_others(cls, fleet: Object, version: str) -> Attempt:
        """fleet: as it is when this rank begins. What is complete then was so without this rank's part."""
        status = weights_status(fleet)
        transaction, prepared = status.get("transaction") or {}, status.get("prepared") or {}
        over = [_identity(transaction)] if transaction.get("completedAt") else []
        over += [_identity(prepared)] if prepared.get("failedAt") or _is_complete(prepared) else []
        return cls(version, over=frozenset(over))

    def has(self, told: Mapping[str, Any]) -> bool:
        """told: status.weights.transaction or .prepared, which name the generation that they were planned from."""
        same = told.get("version") == self.version and int(told.get("generation") or 0) >= self.generation
        return same and _identity(told) not in self.over


class OthersAsking:
    """Whether rank 0, which asks the fleet for what this rank sends as well, has taken it back: the operator may have
    nothing to say of it then. What was asked for when this rank began may be of an earlier life of the trainer, which
    is taken back first: that tells nothing."""

    def __init__(self, fleet: Object, version: str, senders: Collection[str], ahead: bool) -> None:
        self._version = version
        self._senders = list(senders)
        self._ahead = ahead
        self._tells = not self.asked(fleet)
        self._seen = False

    def asked(self, fleet: Object) -> bool:
        weights = (fleet.get("spec") or {}).get("weights") or {}
        wanted = (weights.get("prepare") or {}) if self._ahead else weights
        return wanted.get("version") == self._version and senders_of(wanted) == self._senders

    def taken_back(self, fleet: Object) -> Verdict | None:
        """To be shown the fleet after each change."""
        asked = self.asked(fleet)
        self._seen = self._seen or asked
        goes_on = asked or asked_version(fleet) == self._version or self._version in known_labels(fleet)
        if goes_on or not (self._tells and self._seen):
            return None
        return Verdict("Failed", "rank 0 does not ask for it any more: its own error says why", serving(fleet))


def serving(fleet: Object) -> str:
    return str(weights_status(fleet).get("version") or "")


def publish_verdict(fleet: Object, attempt: Attempt) -> Verdict | None:
    """None: not over yet."""
    status = weights_status(fleet)
    transaction = status.get("transaction") or {}
    ours = attempt.has(transaction)
    now = serving(fleet)
    if fleet["metadata"].get("deletionTimestamp"):
        return Verdict("Failed", "the fleet is being deleted", now)
    if ours and now == attempt.version and transaction.get("completedAt"):
        return Verdict(
            "Committed",
            serving=now,
            root=str(transaction.get("root") or ""),
            stall_seconds=float(transaction.get("stallSeconds") or 0),
            engines=outcomes(fleet, attempt.version),
        )
    if ours and has_failed(status):
        told = str(transaction.get("message") or "it failed")
        return Verdict("Failed", told, now, engines=outcomes(fleet, attempt.version))
    asked = asked_version(fleet)
    if attempt.generation and asked != attempt.version and _is_later(fleet, attempt):
        if ours and transaction.get("decision") == "Commit":
            return None
        return Verdict("Failed", f"somebody else has asked for version {asked or 'of model.path'} meanwhile", now)
    return None


def prepare_verdict(fleet: Object, attempt: Attempt) -> Verdict | None:
    """As publish_verdict(). Prepared: all engines that take part hold it; until then the operator's message names those
    that do not."""
    prepared = weights_status(fleet).get("prepared") or {}
    if fleet["metadata"].get("deletionTimestamp"):
        return Verdict("Failed", "the fleet is being deleted", serving(fleet))
    wanted = (((fleet.get("spec") or {}).get("weights") or {}).get("prepare") or {}).get("version")
    if attempt.generation and wanted != attempt.version and _is_later(fleet, attempt):
        return Verdict("Failed", f"somebody else prepares {wanted or 'nothing'} now", serving(fleet))
    if not attempt.has(prepared) or not is_seen(fleet, attempt.generation):
        return None
    if prepared.get("failedAt"):
        return Verdict("Failed", str(prepared.get("message") or "it failed"), serving(fleet))
    if _is_complete(prepared):
        return Verdict("Prepared", serving=serving(fleet), root=str(prepared["root"]))
    return None


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


def publish_progress(fleet: Object, version: str) -> str:
    """What the fleet is doing with the version, for an error that says why it is not done."""
    status = weights_status(fleet)
    transaction = status.get("transaction") or {}
    if transaction.get("version") != version:
        return "the operator has not begun: does it run?"
    counts = f"{transaction.get('prepared', 0)} engines prepared, {transaction.get('committed', 0)} committed"
    return f"{status.get('phase', 'Idle')}, {counts}{_because(transaction)}"


def prepare_progress(fleet: Object, version: str) -> str:
    """As publish_progress()."""
    prepared = weights_status(fleet).get("prepared") or {}
    if prepared.get("version") != version:
        return "the operator has not begun: does it run?"
    return f"{prepared.get('engines', 0)} engines hold it{_because(prepared)}"


def _identity(told: Mapping[str, Any]) -> str:
    return str(told.get("id") or f"{told.get('generation')}.{told.get('attempt')}")


def _is_complete(prepared: Mapping[str, Any]) -> bool:
    return bool(prepared.get("root") and prepared.get("engines") and not prepared.get("message"))


def _because(told: Mapping[str, Any]) -> str:
    return f"; {told['message']}" if told.get("message") else ""


def _is_later(fleet: Object, attempt: Attempt) -> bool:
    return int(fleet["metadata"].get("generation") or 0) >= attempt.generation
