"""Whether a label of weights may be given to other bytes now, and what must be taken back before: pure functions over
the resource. A label that a fleet has committed means those bytes for good; one whose attempt came to nothing is free
again as soon as the operator has let go of that attempt."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ..protocol.pod import address_of

Object = Mapping[str, Any]

_VERSION = re.compile(r"[!-~]([ -~]*[!-~])?")
MAX_VERSION = 128
BOOT_VERSION = "default"  # SGLang's word for weights that nobody has labelled


@dataclass(frozen=True)
class Standing:
    """refusal: why the label must not be used now. unseen: the operator has not seen the fleet's last change, so what
    it says may be of before; look again in a moment. left: an attempt that came to nothing is still asked for, or still
    kept by the operator: take it back first."""

    refusal: str = ""
    unseen: bool = False
    left: bool = False


def standing(fleet: Object, version: str, senders: Collection[str]) -> Standing:
    """Of a label that is to be sent from `senders`, host:port each. What is open for just these senders is from an
    earlier life of theirs, since nobody else listens there now."""
    if reason := refusal(fleet, version):
        return Standing(reason)
    status, asked, unseen = weights_status(fleet), asked_version(fleet), not is_seen(fleet)
    if (moving := _moving_to(fleet)) and not has_failed(status):
        given_up = unseen and asked != moving
        own = asked == moving == version and set(_senders(fleet)) == set(senders)
        if not given_up and not own:
            return Standing(
                f"fleet {fleet['metadata']['name']} is moving to version {moving} now, for the trainer at "
                f"{', '.join(_senders(fleet)) or 'another place'}: wait until it is done, or stop that trainer"
            )
    if unseen:
        return Standing(unseen=True)
    ahead = (_asked(fleet).get("prepare") or {}, status.get("prepared") or {})
    return Standing(left=asked == version or version in (one.get("version") for one in ahead))


def refusal(fleet: Object, version: str) -> str:
    """Why this label cannot be committed by this fleet, whoever has the bytes; empty: it can."""
    name = fleet["metadata"]["name"]
    if len(version) > MAX_VERSION or not _VERSION.fullmatch(version) or version == BOOT_VERSION:
        return (
            f"{version!r} is no label of weights: use 1 to {MAX_VERSION} printable characters without a space at "
            f"either end, and not '{BOOT_VERSION}'"
        )
    if fleet["metadata"].get("deletionTimestamp"):
        return f"fleet {name} is being deleted"
    if (fleet.get("spec") or {}).get("control") == "External":
        return (
            f"fleet {name} has control External: move its weights through the agents, as docs/external-control.md says"
        )
    if version in known_labels(fleet):
        return f"fleet {name} knows version {version} already: a version means one set of bytes, choose another label"
    if not (fleet.get("status") or {}).get("engines"):
        return f"fleet {name} has no engines: raise spec.replicas and wait until they are ready"
    return ""


def taken_back(fleet: Object, version: str, source: Mapping[str, Any]) -> dict[str, Any]:
    """A patch of spec.weights after which nobody asks for `version`, and the fleet stays at what it serves. source: a
    trainer's, for what a trainer has sent; nothing is sent by it."""
    ahead = {"prepare": None} if (_asked(fleet).get("prepare") or {}).get("version") == version else {}
    return {**_as_served(fleet, source), **ahead}


def weights_status(fleet: Object) -> Mapping[str, Any]:
    found: Mapping[str, Any] = (fleet.get("status") or {}).get("weights") or {}
    return found


def asked_version(fleet: Object) -> str:
    return str(_asked(fleet).get("version") or "")


def has_failed(status: Mapping[str, Any]) -> bool:
    """Whether the last move came to nothing; it may be tried again."""
    return bool(status.get("phase") == "Failed" or (status.get("transaction") or {}).get("decision") == "Abort")


def is_seen(fleet: Object, generation: int = 0) -> bool:
    """Whether status answers the resource of that generation; 0: as it is."""
    wanted = generation or int(fleet["metadata"].get("generation") or 0)
    return int((fleet.get("status") or {}).get("observedGeneration") or 0) >= wanted


def senders_of(asked: Mapping[str, Any]) -> list[str]:
    """host:port of each in spec.weights or spec.weights.prepare."""
    source = asked.get("source") or {}
    listed = (source.get("distributed") or source.get("colocated") or {}).get("senders") or []
    return [address_of(one["address"], one["port"]) for one in listed]


def known_labels(fleet: Object) -> set[str]:
    """Labels that mean certain bytes to the fleet, or to one of its engines."""
    status = weights_status(fleet)
    transaction = status.get("transaction") or {}
    found = {str(entry.get("version")) for entry in status.get("history") or ()} | {str(status.get("version") or "")}
    found |= {str(engine.get("weightVersion") or "") for engine in (fleet.get("status") or {}).get("engines") or ()}
    if transaction.get("decision") == "Commit":
        found.add(str(transaction.get("version")))
    return found


def _moving_to(fleet: Object) -> str:
    status = weights_status(fleet)
    transaction = status.get("transaction") or {}
    if transaction and not transaction.get("completedAt"):
        return str(transaction.get("version"))
    asked, target = asked_version(fleet), str(status.get("targetVersion") or "")
    # Asked for, and not seen by the operator yet.
    return asked if asked and asked not in (target, status.get("version")) else ""


def _senders(fleet: Object) -> list[str]:
    """Of the move that is open or asked for."""
    told = ((weights_status(fleet).get("transaction") or {}).get("source") or {}).get("senders") or []
    return list(told) or senders_of(_asked(fleet))


def _as_served(fleet: Object, source: Mapping[str, Any]) -> dict[str, Any]:
    newest = (weights_status(fleet).get("history") or [{}])[-1]
    label, path = str(newest.get("version") or ""), str(newest.get("path") or "")
    version = None if label in ("", BOOT_VERSION) else label
    if asked_version(fleet) == (version or ""):
        return {}
    ahead = _asked(fleet).get("prepare") or {}
    if version is None or path == ((fleet.get("spec") or {}).get("model") or {}).get("path"):
        return {"version": version, "source": None}
    if ahead.get("version") == label:  # it was staged ahead, and means the same source for good
        return {"version": version, "source": {"disk": None, "distributed": None, "colocated": None, **ahead["source"]}}
    if path:
        disk = {"type": "Disk", "disk": {"path": path}, "distributed": None, "colocated": None}
        return {"version": version, "source": disk}
    return {"version": version, "source": source}


def _asked(fleet: Object) -> Mapping[str, Any]:
    found: Mapping[str, Any] = (fleet.get("spec") or {}).get("weights") or {}
    return found
