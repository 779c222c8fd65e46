"""Keeps one router's workers as desired: one step lists, compares and repairs, and says what it saw."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence

from sglang_rollout.protocol.routing import RegisteredWorker, RouterDesired, RouterReport, Worker

from .membership import (
    LABEL_ENGINE,
    LABEL_FLEET,
    LABEL_INCARNATION,
    Action,
    Add,
    Comparison,
    ListedWorker,
    Remove,
    Update,
    compare,
)
from .workers_api import RouterRefused, RouterUnreachable, WorkersApi

log = logging.getLogger(__name__)

AT_ONCE = 64  # calls to the router and probes of engines
PROBLEMS_SHOWN = 3
ADDING_SECONDS = 10.0  # for so long an addition that the router has taken may still show
REMEMBERED_SECONDS = 60.0  # what a silent router had is believed for so long

Objection = Callable[[Worker], Awaitable[str]]


async def _no_objection(worker: Worker) -> str:
    return ""


class MembershipKeeper:
    """The membership of one router.

    exclusive: the router is ours: it shall have the desired workers and no other.
    objection: asked before a worker is added; a sentence keeps it out and goes into the report.
    Reports carry revision 0: whoever publishes them counts. What a router is not seen to have lost it has: only one
    that nobody listens for has no workers.
    """

    def __init__(
        self,
        api: WorkersApi,
        fleet: str,
        *,
        exclusive: bool,
        pod_uid: str = "",
        objection: Objection = _no_objection,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._fleet = fleet
        self._exclusive = exclusive
        self._pod_uid = pod_uid
        self._objection = objection
        self._start = secrets.token_hex(8)
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._clock = clock
        self._seen: list[RegisteredWorker] | None = None
        self._seen_at = clock()
        self._adding: dict[str, float] = {}  # URL -> until when the router may still begin to list it

    def unseen_report(self, desired: RouterDesired | None, message: str) -> RouterReport:
        """What can be said while the router does not show its workers: those that it had, or was to have."""
        had = self._seen
        if had is None:
            had = [] if desired is None else [_assumed(worker) for worker in desired.workers]
        fresh = self._clock() - self._seen_at < REMEMBERED_SECONDS
        return self._report(desired, had if fresh else [], in_step=False, message=message)

    async def step(self, desired: RouterDesired | None) -> RouterReport:
        """One attempt. Without a desired set the router is only looked at. What failed is in the report's message
        and is tried again with the next step; only what the API's `credential` raises is raised."""
        try:
            listed = await self._api.list()
        except RouterUnreachable as error:
            message = f"the router does not answer: {error}"
            if not error.absent:
                return self.unseen_report(desired, message)
            self._adding.clear()
            self._remember([])
            return self._report(desired, [], in_step=False, router_up=False, message=message)
        except RouterRefused as error:
            return self.unseen_report(desired, f"the router's worker API cannot be used: {error}")
        registered = [_registered(worker) for worker in sorted(listed, key=_by_url) if self._counts(worker)]
        self._remember(registered)
        if desired is None:
            return self._report(None, registered, in_step=False, message=_message(None, ()))
        comparison = compare(desired.workers, listed, self._fleet, self._exclusive)
        late = self._may_still_show(desired, listed)
        problems = await self._perform(comparison.actions)
        message = _message(comparison, problems)
        if late and not message:
            message = f"the addition of {late[0]} cannot be taken back yet"
        return self._report(desired, registered, in_step=comparison.in_step and not late, message=message)

    def _may_still_show(self, desired: RouterDesired, listed: Sequence[ListedWorker]) -> list[str]:
        """URLs that are no longer wanted, whose addition the router has taken and does not list yet: until it does
        they cannot be removed, and then they would get requests."""
        now = self._clock()
        shown = {worker.url for worker in listed}
        self._adding = {url: until for url, until in self._adding.items() if url not in shown and now < until}
        return sorted(self._adding.keys() - {worker.url for worker in desired.workers})

    def _remember(self, registered: list[RegisteredWorker]) -> None:
        self._seen, self._seen_at = registered, self._clock()

    async def _perform(self, actions: Sequence[Action]) -> list[str]:
        """Removals have been handed over before anything is added."""
        removals = [action for action in actions if isinstance(action, Remove)]
        others = [action for action in actions if not isinstance(action, Remove)]
        results = await asyncio.gather(*map(self._attempt, removals))
        results += await asyncio.gather(*map(self._attempt, others))
        return [problem for problem in results if problem]

    async def _attempt(self, action: Action) -> str:
        async with self._slots:
            if isinstance(action, Add):
                objection = await self._objection(action.worker)
                if objection:
                    return objection
                self._adding[action.worker.url] = self._clock() + ADDING_SECONDS
            log.info("%s", _told(action))
            try:
                await self._api.perform(action)
            except (RouterUnreachable, RouterRefused) as error:
                return str(error)
        return ""

    def _report(
        self,
        desired: RouterDesired | None,
        registered: Sequence[RegisteredWorker],
        *,
        in_step: bool,
        router_up: bool = True,
        message: str,
    ) -> RouterReport:
        return RouterReport(
            revision=0,
            sidecar_start=self._start,
            pod_uid=self._pod_uid,
            lease_term=0 if desired is None else desired.lease_term,
            desired_id="" if desired is None else desired.id,
            in_step=in_step,
            router_up=router_up,
            registered=list(registered),
            message=message,
        )

    def _counts(self, worker: ListedWorker) -> bool:
        return not worker.leaving and (self._exclusive or worker.labels.get(LABEL_FLEET) == self._fleet)


def _told(action: Action) -> str:
    match action:
        case Add(worker):
            return f"adding {worker.engine} at {worker.url}"
        case Update(worker=worker, key_changed=key_changed):
            return f"updating {'key and labels' if key_changed else 'labels'} of {worker.engine} at {worker.url}"
        case Remove(url=url):
            return f"removing {url}"


def _by_url(worker: ListedWorker) -> str:
    return worker.url


def _assumed(worker: Worker) -> RegisteredWorker:
    return RegisteredWorker(worker.url, worker.engine, worker.incarnation, healthy=False)


def _registered(worker: ListedWorker) -> RegisteredWorker:
    incarnation = worker.labels.get(LABEL_INCARNATION, "")
    return RegisteredWorker(
        url=worker.url,
        engine=worker.labels.get(LABEL_ENGINE, ""),
        incarnation=int(incarnation) if incarnation.isdecimal() else 0,
        healthy=worker.healthy,
    )


def _message(comparison: Comparison | None, problems: Sequence[str]) -> str:
    if comparison is None:
        return "no operator has said yet which workers the router shall have"
    if problems:
        more = f"; and {len(problems) - PROBLEMS_SHOWN} more" if len(problems) > PROBLEMS_SHOWN else ""
        return "; ".join(sorted(problems)[:PROBLEMS_SHOWN]) + more
    if comparison.awaited:
        names = ", ".join(worker.engine for worker in comparison.awaited[:PROBLEMS_SHOWN])
        return f"the earlier registration of {names} must drain before it is added again"
    if not comparison.in_step:
        return "workers are being changed"
    return ""
