"""Carries out a plan and decides nothing: the decision first, then orders and children, the status, and deletes last:
what is counted in the status must be counted before it is done."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..api import names
from ..protocol.desired import AgentDesired
from ..protocol.report import AgentReport
from ..protocol.routing import RouterDesired, RouterReport
from ..transitions.planned import DeleteOrder, Plan, soonest
from .applies import Applier, ChildKey, ForeignObject, child_key
from .events import EventRecorder
from .external_router import ExternalRouters
from .kinds import BY_NAME, ROLLOUT, SUPPORTING_KINDS, Object
from .kube import KubeClient
from .kube_errors import Conflict, KubeError, NotFound, Refused
from .lease import LeaderLease
from .links import LinkPool
from .rollouts import FleetKey, Rollout
from .status_writes import STILL_SECONDS, may_wait, only_orders_count

log = logging.getLogger(__name__)

APPLIES_AT_ONCE = 64  # a large fleet is made in passes, so that a new spec never waits for all of it
DELETE_SECONDS = 10.0  # an object is not deleted again sooner


class NotLeading(Exception):
    """The lease is no longer ours: nothing may be done any more."""


class Overtaken(Exception):
    """The resource was changed since the plan was made from it: read and plan again."""


class ExecutionFailed(Exception):
    """Calls that failed for no lasting reason, joined; trying again can help. again: as in Outcome; what the plan
    waits for must not wait for a backoff."""

    def __init__(self, message: str, again: float | None) -> None:
        super().__init__(message)
        self.again = again


@dataclass(frozen=True)
class Outcome:
    """again: seconds until the resource must be looked at again; None: only when something changes."""

    again: float | None


@dataclass
class _Last:
    """What was done for a fleet last, and when. rest_done: all that is no order. wanted: its children. left_out:
    engines that the routers must not have, and why."""

    status_written: float = float("-inf")
    rest_done: float = float("-inf")
    wanted: set[ChildKey] = field(default_factory=set)
    left_out: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Executor:
    """on_written: told of the resource as the API server answered a status write."""

    kube: KubeClient
    lease: LeaderLease
    applier: Applier
    agents: LinkPool[AgentDesired, AgentReport]
    routers: LinkPool[RouterDesired, RouterReport]
    external: ExternalRouters
    events: EventRecorder
    on_written: Callable[[Object], None]
    clock: Callable[[], float] = time.monotonic
    _secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    _last: dict[FleetKey, _Last] = field(default_factory=lambda: defaultdict(_Last))
    _deleted: dict[str, float] = field(default_factory=dict)

    async def execute(self, key: FleetKey, rollout: Rollout, plan: Plan) -> Outcome:
        """Raises NotLeading, Overtaken, ExecutionFailed. Overtaken of a decision: nothing else was done."""
        self._must_lead()
        if plan.decision:
            await self._write_status(key, rollout, plan.status.to_object())
            self._last[key].rest_done = self.clock()  # what people and pods wait for is done by it
        self.agents.want(key, plan.agents)
        self.routers.want(key, plan.routers)
        self.external.want(key, plan.external_router)
        self._tell_left_out(key, plan.left_out)
        await _let_go_out()
        wait = self._wait_for_rest(key, rollout, plan)
        if wait > 0:
            if plan.decision:
                self._tell_events(rollout, plan)
            return Outcome(soonest(plan.requeue_after, wait))
        errors_before = self.apply_errors(key)
        failures, look_again = await self._apply_children(key, rollout, plan)
        again = soonest(plan.requeue_after, look_again)
        if self.apply_errors(key) != errors_before:
            again = 0.0  # the status must tell it
        untold, write_later = "", None
        if not plan.decision:
            untold, write_later = await self._status(key, rollout, plan)
        if untold:
            failures.append(untold)
        else:
            failures += await _gathered(self._delete(key[0], order) for order in plan.deletes)
        again = soonest(again, write_later)
        self._tell_events(rollout, plan)
        self._last[key].rest_done = self.clock()
        if failures:
            raise ExecutionFailed("; ".join(failures), again)
        return Outcome(again)

    def _wait_for_rest(self, key: FleetKey, rollout: Rollout, plan: Plan) -> float:
        """Seconds for which children and status need not be looked at."""
        told = rollout.model.status.weights
        if not only_orders_count(told.phase if told else "", plan):
            return 0.0
        return self._last[key].rest_done + STILL_SECONDS - self.clock()

    def _tell_events(self, rollout: Rollout, plan: Plan) -> None:
        for note in plan.events:
            self.events.record(rollout.object, note)

    def _tell_left_out(self, key: FleetKey, left_out: Mapping[str, str]) -> None:
        """For the log: the status may be written too late to show what was so for a moment."""
        before = self._last[key].left_out
        for engine in sorted(left_out.keys() | before.keys()):
            if (why := left_out.get(engine)) != before.get(engine):
                log.info("%s/%s: %s %s", *key, engine, f"is kept out of the routers: {why}" if why else "is routable")
        self._last[key].left_out = left_out

    def peer_key(self, rollout: Rollout) -> str:
        """What agents of one fleet show each other. It lives as long as this process: the next leader gives another."""
        return hmac.new(self._secret, rollout.uid.encode(), hashlib.sha256).hexdigest()

    def apply_errors(self, key: FleetKey) -> Mapping[tuple[str, str], str]:
        """By (kind, name): children that the API server refused at their last apply."""
        return self.applier.errors(key[0], self._last[key].wanted)

    def forget(self, key: FleetKey) -> None:
        """The resource is gone."""
        if last := self._last.pop(key, None):
            self.applier.forget(last.wanted)
        self.external.want(key, None)

    # Children

    async def _apply_children(self, key: FleetKey, rollout: Rollout, plan: Plan) -> tuple[list[str], float | None]:
        """What failed, and seconds until the children must be looked at again."""
        wanted = self._last[key].wanted = {child_key(manifest) for manifest in plan.applies}
        due = [manifest for manifest in plan.applies if self.applier.is_due(manifest)]
        supporting = {kind.kind for kind in SUPPORTING_KINDS}
        due.sort(key=lambda manifest: manifest["kind"] not in supporting)
        now, later = due[:APPLIES_AT_ONCE], due[APPLIES_AT_ONCE:]
        # Pods need their ServiceAccounts and ConfigMaps: a StatefulSet that comes first fails and backs off.
        first = [manifest for manifest in now if manifest["kind"] in supporting]
        rest = [manifest for manifest in now if manifest["kind"] not in supporting]
        failures = await _gathered(self._apply(manifest, rollout.uid) for manifest in first)
        failures += await _gathered(self._apply(manifest, rollout.uid) for manifest in rest)
        return failures, 0.0 if later else self.applier.retry_after(wanted)

    async def _apply(self, manifest: Mapping[str, Any], owner_uid: str) -> str:
        self._must_lead()
        try:
            await self.applier.apply(manifest, owner_uid)
        except (Refused, ForeignObject) as error:
            log.warning("%s", error)  # lasting: told by the status, not tried again at once
        except KubeError as error:
            return str(error)
        return ""

    async def _delete(self, namespace: str, order: DeleteOrder) -> str:
        self._must_lead()
        if self.clock() - self._deleted.get(order.uid, float("-inf")) < DELETE_SECONDS:
            return ""
        try:
            await self.kube.delete(BY_NAME[order.kind], namespace, order.name, order.uid)
        except (NotFound, Conflict):
            pass  # that object is gone, which is what was wanted
        except KubeError as error:
            return str(error)
        self._deleted = {uid: at for uid, at in self._deleted.items() if self.clock() - at < DELETE_SECONDS}
        self._deleted[order.uid] = self.clock()
        return ""

    # Status

    async def _status(self, key: FleetKey, rollout: Rollout, plan: Plan) -> tuple[str, float | None]:
        """Writes the status unless it is equal or can wait: why it could not be written, empty where nothing went
        wrong, and seconds until it must be written."""
        before, after = rollout.status, plan.status.to_object()
        if before == after:
            return "", None
        age = self.clock() - self._last[key].status_written
        wait = 0.0 if plan.events else may_wait(before, after) - age
        if wait > 0:
            return "", wait
        try:
            await self._write_status(key, rollout, after)
        except KubeError as error:
            return str(error), None
        return "", None

    async def _write_status(self, key: FleetKey, rollout: Rollout, status: Object) -> None:
        """With the resourceVersion that the plan was made from, decision or not: a whole status written by an
        operator that was deposed meanwhile would undo its successor's decision. Raises Overtaken, KubeError."""
        if rollout.status == status:
            return
        self._must_lead()
        metadata = rollout.object["metadata"]
        body = {
            "apiVersion": ROLLOUT.api_version,
            "kind": ROLLOUT.kind,
            "metadata": {name: metadata[name] for name in ("name", "namespace", "resourceVersion")},
            "status": status,
        }
        try:
            written = await self.kube.apply(ROLLOUT, body, names.FIELD_MANAGER_STATUS, "status", strict=False)
        except (Conflict, NotFound) as error:
            raise Overtaken(str(error)) from error
        self._last[key].status_written = self.clock()
        self.on_written(written)

    def _must_lead(self) -> None:
        if not self.lease.leading:
            raise NotLeading(f"{self.lease.identity} no longer leads")


async def _let_go_out() -> None:
    """Lets the links send what was just ordered before anything else is worked out: one turn of the event loop for the
    requests, one for their bodies."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def _gathered(calls: Iterable[Awaitable[str]]) -> list[str]:
    """What failed, in sentences; all calls are finished before the first exception is raised."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if isinstance(result, str) and result]
