"""One fleet's resource on the API server: read, changed only as it was read, and watched for what becomes of
a version."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ..kube_access.cluster import Cluster
from ..kube_access.connection import Object
from ..kube_access.failures import Conflict, Failure, NotFound, Refused
from ..transfer.link import host_port
from .errors import FleetMissing, FleetUnreachable, PublishRefused
from .verdict import Verdict

LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Change:
    """A merge patch of spec.weights, empty: as it is. last: nothing more is to be asked for."""

    weights: Object
    last: bool = True


class FleetResource:
    """All methods block, for as long as a call to the API server may take. Raise FleetUnreachable, FleetMissing."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster = cluster
        self.name = name
        self.last: Object = {}

    def read(self) -> Object:
        try:
            self.last = self._cluster.rollout(self.name)
        except NotFound as error:
            raise FleetMissing(
                f"there is no fleet {self.name} in namespace {self._cluster.namespace}: {error.message}"
            ) from error
        except Failure as error:
            raise FleetUnreachable(error.message) from error
        return self.last

    def change(self, decide: Callable[[Object], Change | None], deadline: float) -> Object:
        """Patches spec.weights as `decide` says, of the fleet as it is; nobody else can have changed it in between.
        None: look again in a moment. Returns the fleet after the change that is the last. deadline: time.monotonic().
        Raises PublishRefused with the API server's own sentence, TimeoutError."""
        while True:
            fleet = self.read()
            change = decide(fleet)
            if change is not None and change.weights:
                patched = self._patch(fleet, change.weights)
                if patched is not None and change.last:
                    return patched
            elif change is not None and change.last:
                return fleet
            else:
                time.sleep(LOOK_SECONDS)
            if time.monotonic() >= deadline:
                raise TimeoutError

    def _patch(self, fleet: Object, weights: Object) -> Object | None:
        """None: somebody else was faster."""
        try:
            self.last = self._cluster.patch(self.name, {"weights": weights}, fleet["metadata"]["resourceVersion"])
        except Conflict:
            return None
        except Refused as error:
            raise PublishRefused(error.message) from error
        except Failure as error:
            raise FleetUnreachable(error.message) from error
        return self.last

    def watch(self, decide: Callable[[Object], Verdict | None], timeout: float) -> Watch:
        return Watch(self, self._cluster, decide, timeout)


class Watch:
    """Looks at the fleet in a thread of its own until `decide` says how it ended."""

    def __init__(
        self, resource: FleetResource, cluster: Cluster, decide: Callable[[Object], Verdict | None], timeout: float
    ) -> None:
        self._resource = resource
        self._cluster = cluster
        self._decide = decide
        self._ends = time.monotonic() + timeout
        self._stopped = False
        self.found: Future[Verdict] = Future()
        threading.Thread(target=self._run, name="fleet-watch", daemon=True).start()

    def _left(self) -> float:
        return 0.0 if self._stopped else max(0.0, self._ends - time.monotonic())

    def stop(self) -> None:
        self._stopped = True

    def _run(self) -> None:
        try:
            for fleet in self._cluster.follow(self._resource.name, self._left, lambda _: None):
                self._resource.last = fleet
                verdict = self._decide(fleet)
                if verdict is not None:
                    self.found.set_result(verdict)
                    return
            self.found.set_exception(TimeoutError())
        except Failure as error:
            self.found.set_exception(FleetUnreachable(error.message))
        except Exception as error:
            self.found.set_exception(error)


def distributed(senders: Sequence[str], transfer: str, transport: str) -> dict[str, Any]:
    """spec.weights.source for these senders, host:port each; the members of other types go."""
    source: dict[str, Any] = {"type": "Distributed", "disk": None, "colocated": None}
    return {**source, "distributed": {"transfer": transfer, "transport": transport, "senders": _listed(senders)}}


def colocated(senders: Sequence[str]) -> dict[str, Any]:
    return {"type": "Colocated", "disk": None, "distributed": None, "colocated": {"senders": _listed(senders)}}


def _listed(senders: Sequence[str]) -> list[dict[str, Any]]:
    return [{"address": host, "port": port} for host, port in map(host_port, senders)]


def as_it_was(weights: Mapping[str, Any] | None) -> dict[str, Any]:
    """A patch that puts version and source back, and what was prepared."""
    before = weights or {}
    source = before.get("source")
    members = {"disk": None, "distributed": None, "colocated": None}
    prepared = {"prepare": before["prepare"]} if before.get("prepare") else {}
    return {"version": before.get("version"), "source": None if source is None else {**members, **source}, **prepared}
