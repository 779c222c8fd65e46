"""One pass over one fleet: gather what is known, plan, carry out. Level-based: it may run at any time, and again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial

from pydantic import ValidationError

from ..protocol import fleet as fleet_protocol
from ..protocol.desired import AgentDesired
from ..protocol.report import AgentReport
from ..protocol.routing import RouterDesired, RouterReport
from ..resources.context import FleetContext
from ..transitions.observed import Observed, PodView
from ..transitions.planned import EventNote, Plan
from .caches import Caches
from .cluster_keys import ClusterKeys
from .events import EventRecorder
from .executor import Executor, Outcome, Overtaken
from .external_router import ExternalRouters
from .kinds import ROLLOUT, Object
from .kube import KubeClient
from .kube_errors import NotFound
from .links import LinkPool
from .pod_calls import Target
from .rollouts import FleetKey, Rollout, Rollouts, must_not_go_back
from .settings import Settings
from .tokens import FleetTokens

log = logging.getLogger(__name__)

WARM_UP_SECONDS = 3.0  # for so long a new leader waits for the first answers of a fleet's pods
REPLANS = 3  # in one pass, when others keep changing the resource
INVALID_SECONDS = 60.0
LONGEST_BURST_SECONDS = 0.25
BURST_PLANS = 4.0  # for as long as so many plans take, reports that still come in are waited for
QUIET_PLANS = 0.1  # of the time that a plan takes: a burst of which nothing came for so long is over
QUIET_TURNS = 3  # of the event loop: it takes as many from an answer's arrival to its being read

Planner = Callable[[Observed, datetime], Plan]


@dataclass
class Reconciler:
    """on_read: told of the resource as it was read again, as on_written of the executor."""

    settings: Settings
    kube: KubeClient
    rollouts: Rollouts
    caches: Caches
    keys: ClusterKeys
    tokens: FleetTokens
    agents: LinkPool[AgentDesired, AgentReport]
    routers: LinkPool[RouterDesired, RouterReport]
    external: ExternalRouters
    executor: Executor
    events: EventRecorder
    planner: Planner
    on_read: Callable[[Object], None]
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    _linked: dict[FleetKey, str] = field(default_factory=dict)
    _linked_pods: dict[FleetKey, tuple[PodView, ...]] = field(default_factory=dict)
    _warming: dict[FleetKey, float] = field(default_factory=dict)
    _plan_seconds: dict[FleetKey, float] = field(default_factory=dict)
    _planned_news: dict[FleetKey, int] = field(default_factory=dict)

    async def reconcile(self, key: FleetKey) -> Outcome:
        """Raises NotLeading, ExecutionFailed and KubeError; the caller tries again. WentBack is final."""
        await self._burst_is_over(key)
        for _ in range(REPLANS):
            rollout = self.rollouts.get(key)
            if rollout is None or rollout.deleting:
                self._forget(key)
                return Outcome(None)
            try:
                _ = rollout.model
            except ValidationError as error:
                self.events.record(rollout.object, EventNote("Warning", "InvalidResource", str(error)))
                return Outcome(INVALID_SECONDS)
            pods = self.caches.pods_of(key)
            self._link(key, rollout, pods)
            waiting = self._warming_up(key)
            if waiting is not None:
                return Outcome(waiting)
            began, self._planned_news[key] = self.clock(), self.agents.news(key)
            plan = self.planner(self._observe(key, rollout, pods), self.now())
            self._plan_seconds[key] = self.clock() - began
            try:
                return await self.executor.execute(key, rollout, plan)
            except Overtaken as error:
                log.info("%s/%s: planning again: %s", *key, error)
                await self._read_again(key)
        return Outcome(0.0)

    async def _burst_is_over(self, key: FleetKey) -> None:
        """Lets reports that come now be read first, for as long as a few plans take at most: the engines of a large
        fleet report at one time, and a plan for each handful of them would delay the one that counts."""
        plan_seconds = self._plan_seconds.get(key, 0.0)
        until = self.clock() + min(BURST_PLANS * plan_seconds, LONGEST_BURST_SECONDS)
        pauses = (*[0.0] * QUIET_TURNS, QUIET_PLANS * plan_seconds)
        heard, quiet = self.agents.news(key), 0
        if heard == self._planned_news.get(key, 0):
            return
        while quiet < len(pauses) and self.clock() < until:
            await asyncio.sleep(pauses[quiet])
            before, heard = heard, self.agents.news(key)
            quiet = quiet + 1 if heard == before else 0

    def _observe(self, key: FleetKey, rollout: Rollout, pods: tuple[PodView, ...]) -> Observed:
        agents, routers = self.agents.of(key), self.routers.of(key)
        silent = {uid: why for links in (agents, routers) for uid, link in links.items() if (why := link.silent)}
        reports = {uid: report for uid, link in agents.items() if (report := link.report) is not None}
        router_reports = {uid: heard for uid, link in routers.items() if (heard := link.report) is not None}
        return Observed(
            rollout=rollout.model,
            context=self._context(rollout.uid),
            children=self.caches.children_of(key, self.now()),
            pods=pods,
            agents=reports,
            routers=router_reports,
            silent=silent,
            untold=frozenset(uid for uid, link in routers.items() if link.untold),
            external_router=self.external.report(key),
            external_untold=self.external.untold(key),
            parting=tuple(self.external.parting(key)),
            apply_errors=self.executor.apply_errors(key),
            peer_key=self.executor.peer_key(rollout),
        )

    def _context(self, uid: str) -> FleetContext:
        return FleetContext(
            operator_namespace=self.settings.namespace,
            operator_pod_labels=self.settings.pod_labels,
            agent_image=self.settings.agent_image,
            router_image=self.settings.router_image,
            trust=self.keys.trust(uid),
        )

    def _link(self, key: FleetKey, rollout: Rollout, pods: tuple[PodView, ...]) -> None:
        """Links to every pod that has an address, the terminating ones too: they still report their draining."""
        audience = fleet_protocol.audience(rollout.uid)
        before = self._linked.get(key)
        if before != audience:
            if before is not None:
                self.tokens.forget(before)
            self._linked[key] = audience
            self._warming[key] = self.clock()
        self.external.sync(key, rollout.model)
        if before == audience and self._linked_pods.get(key) is pods:
            return
        self._linked_pods[key] = pods
        reachable = [pod for pod in pods if pod.ip and pod.phase not in ("Failed", "Succeeded")]
        target = partial(Target, audience=audience)
        self.agents.sync(
            key, {pod.uid: target(pod.uid, pod.name, pod.ip) for pod in reachable if pod.engine is not None}
        )
        self.routers.sync(key, {pod.uid: target(pod.uid, pod.name, pod.ip) for pod in reachable if pod.engine is None})

    def _warming_up(self, key: FleetKey) -> float | None:
        """Seconds to wait for the first answers; None: no more. Planned without them, a fleet that serves would look
        like one that does not."""
        since = self._warming.get(key)
        if since is None:
            return None
        left = since + WARM_UP_SECONDS - self.clock()
        settled = self.agents.settled(key) and self.routers.settled(key) and self.external.settled(key)
        if settled or left <= 0:
            del self._warming[key]
            return None
        return left

    async def _read_again(self, key: FleetKey) -> None:
        before = self.rollouts.get(key)
        try:
            read = await self.kube.get(ROLLOUT, *key)
        except NotFound:
            self.rollouts.remove(key)
            return
        must_not_go_back(before, read)
        self.on_read(read)

    def _forget(self, key: FleetKey) -> None:
        self.agents.sync(key, {})
        self.routers.sync(key, {})
        self.external.sync(key, None)
        self.executor.forget(key)
        self.caches.forget(key)
        self._linked_pods.pop(key, None)
        self._warming.pop(key, None)
        self._plan_seconds.pop(key, None)
        self._planned_news.pop(key, None)
        audience = self._linked.pop(key, None)
        if audience is not None:
            self.tokens.forget(audience)
