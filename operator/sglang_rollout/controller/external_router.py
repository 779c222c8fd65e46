"""Routers that we do not run: the operator itself keeps their workers as planned, as a sidecar does for ours."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import aiohttp

from ..api import SGLangRollout
from ..protocol.routing import RouterDesired, RouterReport, Worker
from ..router.keeper import MembershipKeeper
from ..router.workers_api import WorkersApi
from .lease import LeaderLease
from .rollouts import FleetKey

log = logging.getLogger(__name__)

REPAIR_SECONDS = 2.0  # the router may lose its workers at any time
LEAVE_SECONDS = 60.0  # that a router which is not the fleet's any more is asked to forget its engines
NOBODY = RouterDesired(0, "nobody")


class CredentialMissing(Exception):
    """spec.router.external.credential names a file that is not mounted."""


class Membership(Protocol):
    """Keeps the workers of one router. step() makes one attempt with deadlines of its own, and tells what failed in
    the report's message; it raises CredentialMissing."""

    async def step(self, desired: RouterDesired | None) -> RouterReport: ...


@dataclass(frozen=True)
class ExternalTarget:
    """url: of the router; credential: file of what its worker API asks for, None: nothing; fleet: whose workers."""

    url: str
    credential: Path | None
    fleet: FleetKey

    def read_credential(self) -> str:
        """Read on every call, so that a rotated one counts. Raises CredentialMissing."""
        if self.credential is None:
            return ""
        try:
            return self.credential.read_text().strip()
        except OSError as error:
            raise CredentialMissing(
                f"the credential {self.credential.name!r} of router.external cannot be read: {error.strerror}:"
                f" mount it into the operator as {self.credential}"
            ) from error


MakeMembership = Callable[[ExternalTarget], Membership]


def keeper_on(session: aiohttp.ClientSession, lease: LeaderLease) -> MakeMembership:
    """Memberships by smg's and sglang-router's worker API. Workers of others at the same router are left alone. Such a
    router knows no terms, so an operator that is deposed in the middle of a step must itself add no more."""

    async def objection(worker: Worker) -> str:
        return "" if lease.leading else f"{worker.engine} is not added: {lease.identity} no longer leads"

    def make(target: ExternalTarget) -> Membership:
        fleet = "/".join(target.fleet)
        api = WorkersApi(session, target.url, target.read_credential, fleet)
        return MembershipKeeper(api, fleet, exclusive=False, objection=objection)

    return make


@dataclass
class _Attachment:
    """One fleet's router: a task that repairs it for ever."""

    target: ExternalTarget
    membership: Membership
    lease: LeaderLease
    on_change: Callable[[], None]
    wanted: RouterDesired | None = None
    report: RouterReport | None = None
    done: RouterDesired | None = None  # what `report` is of
    leaving_by: float | None = None  # when it is left alone, gone or not
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    def open(self) -> None:
        self.task = asyncio.create_task(self._run(), name=f"external router {self.target.url}")

    async def close(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)

    @property
    def untold(self) -> bool:
        """What is wanted now was not brought to the router since it is wanted, and something else may have been."""
        return self.done is None or self.done is not self.wanted

    def leave(self) -> None:
        """From now on the router is to have none of the fleet's engines; then the task ends by itself."""
        self.leaving_by = time.monotonic() + LEAVE_SECONDS
        self.want(NOBODY)

    def _has_left(self) -> bool:
        if self.leaving_by is None:
            return False
        if time.monotonic() > self.leaving_by:
            log.error("the router %s may keep engines of %s: %s", self.target.url, *self._said())
            return True
        report = self.report
        gone = report is not None and not report.registered and (report.in_step or not report.router_up)
        return gone and not self.untold

    def _said(self) -> tuple[str, str]:
        return "/".join(self.target.fleet), self.report.message if self.report else "it was never heard"

    def want(self, desired: RouterDesired) -> None:
        if desired != self.wanted:
            self.wanted = desired
            self.wake.set()

    async def _run(self) -> None:
        while self.lease.leading:
            self.wake.clear()
            wanted, was_untold = self.wanted, self.untold
            report = await self._step(wanted)
            before, self.report, self.done = self.report, report, wanted
            if self._has_left():
                break
            if was_untold or before is None or replace(before, revision=report.revision) != report:
                self.on_change()
            with suppress(TimeoutError):
                async with asyncio.timeout(REPAIR_SECONDS):
                    await self.wake.wait()
        self.on_change()

    async def _step(self, desired: RouterDesired | None) -> RouterReport:
        wanted = desired and replace(desired, lease_term=self.lease.term)
        try:
            return await self.membership.step(wanted)
        except CredentialMissing as error:
            message = str(error)
        except Exception as error:
            log.exception("the router %s could not be kept", self.target.url)
            message = f"the router could not be kept: {type(error).__name__}: {error}"
        return RouterReport(0, "", "", desired_id="" if wanted is None else wanted.id, message=message)


class ExternalRouters:
    """By fleet; a fleet without spec.router.external has none. credentials_dir: the files that
    spec.router.external.credential names, mounted into the operator in one folder a namespace: nobody can have the
    credential of another namespace sent to a URL of their own."""

    def __init__(
        self,
        make: MakeMembership,
        lease: LeaderLease,
        credentials_dir: Path,
        on_change: Callable[[FleetKey], None],
    ) -> None:
        self._make = make
        self._lease = lease
        self._credentials_dir = credentials_dir
        self._on_change = on_change
        self._attached: dict[FleetKey, _Attachment] = {}
        self._leaving: dict[FleetKey, list[_Attachment]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def sync(self, key: FleetKey, rollout: SGLangRollout | None) -> None:
        """Attaches to the router that the resource names now; None: the resource is gone. A router that it names no
        more forgets the fleet's engines."""
        target = None if rollout is None else self._target(key, rollout)
        attached = self._attached.get(key)
        if attached is not None and attached.target != target:
            self._part(key, self._attached.pop(key), target)
        for back in [one for one in self._leaving.get(key, []) if target is not None and one.target.url == target.url]:
            self._leaving[key].remove(back)
            self._detach(back)
        if target is not None and key not in self._attached:
            attached = _Attachment(target, self._make(target), self._lease, lambda: self._on_change(key))
            self._attached[key] = attached
            attached.open()

    def _part(self, key: FleetKey, attached: _Attachment, target: ExternalTarget | None) -> None:
        if target is not None and target.url == attached.target.url:
            self._detach(attached)  # the same router, by another credential
            return
        attached.leave()
        self._leaving.setdefault(key, []).append(attached)

    def parting(self, key: FleetKey) -> list[str]:
        """A sentence for each router that may still have engines of the fleet and is to have none."""
        still = [one for one in self._leaving.get(key, []) if one.task is not None and not one.task.done()]
        if still:
            self._leaving[key] = still
        else:
            self._leaving.pop(key, None)
        said = [(one.target.url, one.report.message if one.report else "") for one in still]
        return [
            f"{url} is to forget the fleet's engines" + (f": {message}" if message else "") for url, message in said
        ]

    def want(self, key: FleetKey, desired: RouterDesired | None) -> None:
        if desired is not None and key in self._attached:
            self._attached[key].want(desired)

    def report(self, key: FleetKey) -> RouterReport | None:
        return self._attached[key].report if key in self._attached else None

    def untold(self, key: FleetKey) -> bool:
        """A router may be on its way to other workers than those that its report is of."""
        return bool(self.parting(key)) or (key in self._attached and self._attached[key].untold)

    def settled(self, key: FleetKey) -> bool:
        """Whether the fleet's router, if it has one, was asked once."""
        return key not in self._attached or self._attached[key].report is not None

    async def close(self) -> None:
        """Routers keep what they have: whoever leads next looks after them."""
        leaving = [one for several in self._leaving.values() for one in several]
        for attached in [*self._attached.values(), *leaving]:
            self._detach(attached)
        self._attached, self._leaving = {}, {}
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _target(self, key: FleetKey, rollout: SGLangRollout) -> ExternalTarget | None:
        external = rollout.spec.router.external
        if external is None:
            return None
        credential = None if external.credential is None else self._credentials_dir / key[0] / external.credential
        return ExternalTarget(external.url, credential, key)

    def _detach(self, attached: _Attachment) -> None:
        task = asyncio.create_task(attached.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
