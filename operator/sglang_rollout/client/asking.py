"""One label on its way into spec.weights, and out again when nothing came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from .errors import FleetUnreachable, PublishRefused
from .labels import asked_version, is_seen, refusal, standing, taken_back
from .resource import Change, FleetResource, as_it_was, distributed
from .verdict import Attempt, OthersAsking

Object = Mapping[str, Any]
Transfer = Literal["Staged", "Direct", "Colocated"]

TIMEOUT = 300.0
TAKE_BACK_SECONDS = 20.0


@dataclass
class Asked:
    """What one call wants. bucket_bytes None: by where the tensors are. host: this rank's address as agents reach it.
    halt: done when whoever waits for the call is cancelled."""

    version: str
    transfer: Transfer = "Staged"
    transport: str = "Auto"
    bucket_bytes: int | None = None
    timeout: float = TIMEOUT
    rank: int = 0
    senders: Sequence[str] = ()
    host: str = ""
    halt: Future[None] = field(default_factory=Future)
    begun: float = field(default_factory=time.monotonic)

    @property
    def ends(self) -> float:
        """Of time.monotonic()."""
        return self.begun + self.timeout

    def left(self) -> float:
        return max(0.0, self.ends - time.monotonic())


class Halted(Exception):
    """Whoever waited for this call does not any more."""


class _Decided(Exception):
    """It cannot be taken back: the fleet goes forward."""


class Asking:
    """Rank 0 changes the resource, the others only look at it. All methods block. Raise FleetUnreachable."""

    def __init__(self, resource: FleetResource, asked: Asked) -> None:
        self._resource = resource
        self._asked = asked
        self.others: OthersAsking | None = None  # of a rank that only looks, once it has begun
        self._before: Object | None = None  # spec.weights, once it may have been changed

    def for_new(self, weights: dict[str, Any]) -> Attempt:
        """weights: the patch that asks for it. What an earlier attempt by the same label has left is taken back first,
        and the operator let go of it, so that nothing of that one can be taken for this one. Raises PublishRefused,
        TimeoutError, Halted."""
        asked = self._asked

        def decide(fleet: Object) -> Change | None:
            found = standing(fleet, asked.version, asked.senders)
            if found.refusal:
                raise PublishRefused(found.refusal)
            if found.unseen:
                return None
            self._before = _weights(fleet)
            if found.left:
                source = distributed(asked.senders, "Staged", asked.transport)
                return Change(taken_back(fleet, asked.version, source), last=False)
            return Change(weights)

        return self._change(decide, ahead="prepare" in weights)

    def for_prepared(self) -> Attempt:
        """Raises as for_new()."""
        version = self._asked.version

        def decide(fleet: Object) -> Change | None:
            if reason := refusal(fleet, version):
                raise PublishRefused(reason)
            if asked_version(fleet) == version:
                raise PublishRefused(
                    f"fleet {self._resource.name} is asked to serve version {version} already: wait for it"
                )
            if not is_seen(fleet):  # an earlier commit may be open that was taken back
                return None
            prepared = _weights(fleet).get("prepare") or {}
            if prepared.get("version") != version:
                told = prepared.get("version") or "nothing"
                raise PublishRefused(f"version {version} is not prepared, {told} is: call prepare() first")
            self._before = _weights(fleet)
            members = {"disk": None, "distributed": None, "colocated": None}
            # It is no longer ahead of anything, and must not be asked for again when yet another version serves.
            return Change({"version": version, "source": {**members, **prepared["source"]}, "prepare": None})

        return self._change(decide, ahead=False)

    def take_back(self) -> str:
        """Nobody holds the version any more: the fleet would ask this trainer for it again and again. Returns what is
        left of it all the same, and why; empty: nothing."""
        asked, name = self._asked, self._resource.name
        before = self._before
        if before is None:
            return ""

        def decide(fleet: Object) -> Change | None:
            now = _weights(fleet)
            transaction = ((fleet.get("status") or {}).get("weights") or {}).get("transaction") or {}
            if now.get("version") != asked.version:
                ahead = (now.get("prepare") or {}).get("version") == asked.version
                was_ahead = (before.get("prepare") or {}).get("version") == asked.version
                return Change({"prepare": None} if ahead and not was_ahead else {})
            if transaction.get("version") == asked.version and transaction.get("decision") == "Commit":
                raise _Decided
            return Change(as_it_was(before))

        try:
            self._resource.change(decide, time.monotonic() + TAKE_BACK_SECONDS)
        except _Decided:
            without = (
                "" if asked.transfer == "Staged" else "; engines that do not have it yet restart without this trainer"
            )
            return f"fleet {name} has decided to commit version {asked.version} and goes on with it{without}"
        except (PublishRefused, FleetUnreachable, TimeoutError) as error:
            reason = str(error) or f"not within {TAKE_BACK_SECONDS:.0f} s"
            return f"spec.weights of fleet {name} may still ask for version {asked.version}, put it back: {reason}"
        return ""

    def _change(self, decide: Callable[[Object], Change | None], ahead: bool) -> Attempt:
        asked = self._asked
        if asked.rank != 0:
            fleet = self._resource.read()
            if reason := refusal(fleet, asked.version):
                raise PublishRefused(reason)
            self.others = OthersAsking(fleet, asked.version, asked.senders, ahead)
            return Attempt.by_others(fleet, asked.version)

        def unless_halted(fleet: Object) -> Change | None:
            if asked.halt.done():
                raise Halted
            return decide(fleet)

        fleet = self._resource.change(unless_halted, asked.ends)
        return Attempt(asked.version, int(fleet["metadata"]["generation"]))


def _weights(fleet: Object) -> Mapping[str, Any]:
    found: Mapping[str, Any] = (fleet.get("spec") or {}).get("weights") or {}
    return found
