"""A fleet without a cluster: the API server's resource in memory, an operator that obeys it, and agents that receive
for real over connections of this machine."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sglang_rollout.client.resource import FleetResource
from sglang_rollout.kube_access.failures import Conflict, NotFound
from sglang_rollout.transfer.receiver import GroupCache, Receiving, ReceivingFailed, WeightsRefused, receive
from sglang_rollout.transfer.stage import reserve_host
from tests.transfer.fake_transport import FakeTransport

SLOT = 1 << 16


class FakeApi:
    """In the place of a Cluster."""

    namespace = "train"

    def __init__(self, **spec: Any) -> None:
        self.changed = threading.Condition()
        self.patches: list[dict[str, Any]] = []
        self.before_patch: Callable[[], None] = lambda: None
        self.fleet: dict[str, Any] = {
            "metadata": {"name": "fleet", "generation": 1, "resourceVersion": "1"},
            "spec": {"replicas": 2, **spec},
            "status": {
                "observedGeneration": 1,
                "weights": {"version": "v1", "targetVersion": "v1", "phase": "Idle", "history": [{"version": "v1"}]},
                "engines": [engine("e0"), engine("e1")],
            },
        }

    def rollout(self, name: str) -> dict[str, Any]:
        if name != "fleet":
            raise NotFound(f'sglangrollouts "{name}" not found')
        with self.changed:
            return copy.deepcopy(self.fleet)

    def patch(self, name: str, spec: dict[str, Any], resource_version: str) -> dict[str, Any]:
        assert name == "fleet"
        self.before_patch()
        with self.changed:
            if resource_version != self.fleet["metadata"]["resourceVersion"]:
                raise Conflict("Operation cannot be fulfilled: the object has been modified")
            self.patches.append(spec)
            merge(self.fleet["spec"], spec)
            self.fleet["metadata"]["generation"] += 1
            return self._touch()

    def status(self, generation: int | None = None, **weights: Any) -> None:
        """generation: of the resource that this answers; the present one."""
        with self.changed:
            seen = self.fleet["metadata"]["generation"] if generation is None else generation
            merge(self.fleet["status"], {"observedGeneration": seen, "weights": weights})
            self._touch()

    def _touch(self) -> dict[str, Any]:
        self.fleet["metadata"]["resourceVersion"] = str(int(self.fleet["metadata"]["resourceVersion"]) + 1)
        self.changed.notify_all()
        return copy.deepcopy(self.fleet)

    def follow(self, name: str, left: Callable[[], float], tell: Any) -> Iterator[dict[str, Any]]:
        seen = ""
        while left() > 0:
            now = self.rollout(name)
            if now["metadata"]["resourceVersion"] != seen:
                seen = now["metadata"]["resourceVersion"]
                yield now
            else:
                with self.changed:
                    self.changed.wait(0.05)

    def until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The fleet, as soon as this holds for it."""
        deadline = time.monotonic() + 20
        while not holds(fleet := self.rollout("fleet")):
            assert time.monotonic() < deadline, fleet
            time.sleep(0.005)
        return fleet


def engine(name: str, version: str = "v1", message: str = "") -> dict[str, Any]:
    return {"name": name, "routable": True, "weightVersion": version, "message": message}


def merge(into: dict[str, Any], patch: dict[str, Any]) -> None:
    for key, value in patch.items():
        if value is None:
            into.pop(key, None)
        elif isinstance(value, dict) and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = copy.deepcopy(value)


class FakeOperator(threading.Thread):
    """Stages what spec asks for by real receivers, and commits when they hold it. A move is begun anew only when spec
    was changed since. hurt: keyword arguments of an agent's order, by its name; reference: what the engines run.
    silent: it sees nothing. undecided: it holds back its decisions. root: that it tells, whatever was sent."""

    def __init__(self, api: FakeApi, folder: Path, transport: FakeTransport, reference: Any = None) -> None:
        super().__init__(daemon=True)
        self.api, self.transport, self.reference = api, transport, reference
        self.stages = {name: reserve_host(folder / name, SLOT, 2) for name in ("p0", "p1")}
        self.caches = {name: GroupCache() for name in self.stages}
        self.hurt: dict[str, dict[str, Any]] = {}
        self.stopped = self.silent = self.undecided = False
        self.root = ""

    def run(self) -> None:
        while not self.stopped:
            time.sleep(0.01)
            if not self.silent:
                self._look(self.api.rollout("fleet"))

    def _look(self, fleet: dict[str, Any]) -> None:
        spec, status = fleet["spec"].get("weights") or {}, fleet["status"]["weights"]
        generation, transaction = fleet["metadata"]["generation"], status.get("transaction") or {}
        target, committed = spec.get("version") or "v1", status["history"][-1]["version"]
        if target == committed:
            if transaction and not transaction.get("completedAt"):
                self.api.status(generation, transaction={"decision": "Abort", "completedAt": "now"})
            self._look_ahead(spec.get("prepare") or {}, status, generation)
            if fleet["status"]["observedGeneration"] < generation:
                self.api.status(generation, phase="Idle")
        elif transaction.get("version") != target or transaction.get("generation") != generation:
            self._move(target, spec, status, generation)

    def _look_ahead(self, wanted: dict[str, Any], status: dict[str, Any], generation: int) -> None:
        prepared = status.get("prepared") or {}
        if not wanted or wanted["version"] == status["version"]:
            if prepared:
                self.api.status(generation, prepared=None)
        elif (prepared.get("version"), prepared.get("source")) != (wanted["version"], wanted["source"]):
            begun = {"version": wanted["version"], "source": wanted["source"], "generation": generation, "attempt": 1}
            self.api.status(generation, prepared=None)
            self.api.status(generation, prepared=begun)
            roots, errors = asyncio.run(self._stage(wanted["version"], wanted["source"]))
            while self.undecided and not self.stopped and self._still_asks(wanted["version"], "prepare"):
                time.sleep(0.01)
            if self._still_asks(wanted["version"], "prepare"):
                told = {"root": roots[0], "engines": 2} if roots else {"failedAt": "now", "message": errors[0]}
                self.api.status(generation, prepared=told)

    def _move(self, version: str, spec: dict[str, Any], status: dict[str, Any], generation: int) -> None:
        prepared = status.get("prepared") or {}
        ahead = prepared.get("root") if prepared.get("version") == version else None
        begun = {"id": f"g{generation}.1:{version}", "version": version, "generation": generation, "root": ahead}
        nothing = {"completedAt": None, "decision": None, "message": None}
        self.api.status(generation, phase="Staging", transaction={**nothing, **begun}, targetVersion=version)
        roots, errors = ([ahead], []) if ahead else asyncio.run(self._stage(version, spec["source"]))
        while self.undecided and not self.stopped and self._still_asks(version):
            time.sleep(0.01)
        if not self._still_asks(version):
            return
        if not roots:
            failed = {"decision": "Abort", "message": errors[0], "completedAt": "now"}
            self.api.status(generation, phase="Failed", transaction=failed)
            return
        committed = {"decision": "Commit", "completedAt": "now", "stallSeconds": "0.25", "root": self.root or roots[0]}
        with self.api.changed:
            self.api.fleet["status"]["engines"] = [engine("e0", version), engine("e1", version)]
        self.api.status(
            generation,
            phase="Idle",
            version=version,
            transaction=committed,
            history=[*status["history"], {"version": version}],
        )

    def _still_asks(self, version: str, ahead: str = "") -> bool:
        weights = self.api.rollout("fleet")["spec"].get("weights") or {}
        return bool((weights.get(ahead, {}) if ahead else weights).get("version") == version)

    async def _stage(self, version: str, source: dict[str, Any]) -> tuple[list[str], list[str]]:
        senders = tuple(f"{one['address']}:{one['port']}" for one in source["distributed"]["senders"])

        async def agent(name: str) -> str:
            words: dict[str, Any] = {
                "transaction": "t-" + version, "version": version, "senders": senders, "receiver": name, "slot": "a",
                "members": len(self.stages), "reference": self.reference, "timeout": 5.0, **self.hurt.get(name, {}),
            }  # fmt: skip
            order = Receiving(**words)
            return (await receive(self.stages[name], [self.transport], self.caches[name], order))[0].root

        results = await asyncio.gather(*(agent(name) for name in self.stages), return_exceptions=True)
        for one in results:
            if isinstance(one, BaseException) and not isinstance(one, ReceivingFailed | WeightsRefused):
                raise one
        return [r for r in results if isinstance(r, str)], [str(r) for r in results if not isinstance(r, str)]


def resource(api: FakeApi, name: str = "fleet") -> FleetResource:
    return FleetResource(api, name)  # type: ignore[arg-type]
