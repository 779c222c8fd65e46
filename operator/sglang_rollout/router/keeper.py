"""Keeps one router's workers as desired: one step lists, compares and repairs, and says what it saw."""

from __future__ import annotations

import asyncio
import logging
import secrets
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

Objection = Callable[[Worker], Awaitable[str]]


async def _no_objection(worker: Worker) -> str:
    return ""


class MembershipKeeper:
    """The membership of one router.

    exclusive: the router is ours: it shall have the desired workers and no other.
    objection: asked before a worker is added; a sentence keeps it out and goes into the report.
    Reports carry revision 0: whoever publishes them counts.
    """

    def __init__(
        self,
        api: WorkersApi,
        fleet: str,
        *,
        exclusive: bool,
        pod_uid: str = "",
        objection: Objection = _no_objection,
    ) -> None:
        self._api = api
        self._fleet = fleet
        self._exclusive = exclusive
        self._pod_uid = pod_uid
        self._objection = objection
        self._start = secrets.token_hex(8)
        self._slots = asyncio.Semaphore(AT_ONCE)

    def idle_report(self, desired: RouterDesired | None, message: str) -> RouterReport:
        """What can be said before the router was asked about `desired`."""
        return RouterReport(
            revision=0,
            sidecar_start=self._start,
            pod_uid=self._pod_uid,
            lease_term=0 if desired is None else desired.lease_term,
            desired_id="" if desired is None else desired.id,
            message=message,
        )

    async def step(self, desired: RouterDesired | None) -> RouterReport:
        """One attempt. Without a desired set the router is only looked at. What failed is in the report's message
        and is tried again with the next step; only what the API's `credential` raises is raised."""
        try:
            listed = await self._api.list()
        except RouterUnreachable as error:
            return self.idle_report(desired, f"the router does not answer: {error}")
        except RouterRefused as error:
            return self.idle_report(desired, f"the router's worker API cannot be used: {error}")
        if desired is None:
            return self._report(None, listed, None, ())
        comparison = compare(desired.workers, listed, self._fleet, self._exclusive)
        problems = await self._perform(comparison.actions)
        return self._report(desired, listed, comparison, problems)

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
            log.info("%s", _told(action))
            try:
                await self._api.perform(action)
            except (RouterUnreachable, RouterRefused) as error:
                return str(error)
        return ""

    def _report(
        self,
        desired: RouterDesired | None,
        listed: Sequence[ListedWorker],
        comparison: Comparison | None,
        problems: Sequence[str],
    ) -> RouterReport:
        return RouterReport(
            revision=0,
            sidecar_start=self._start,
            pod_uid=self._pod_uid,
            lease_term=0 if desired is None else desired.lease_term,
            desired_id="" if desired is None else desired.id,
            in_step=comparison is not None and comparison.in_step,
            router_up=True,
            registered=[_registered(worker) for worker in sorted(listed, key=_by_url) if self._counts(worker)],
            message=_message(comparison, problems),
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
