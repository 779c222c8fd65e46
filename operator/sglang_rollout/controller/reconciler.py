"""One pass over one fleet: gather what is known, plan, carry out. Level-based: it may run at any time, and again."""

from __future__ import annotations

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
from .bursts import Bursts
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

Planner = Callable[[Observed, datetime], Plan]


@dataclass
class _Linked:
    """What is remembered of a fleet whose pods are linked to. audience: of their tokens. warming_since: None once their
    first answers are waited for no longer."""

    audience: str
    warming_since: float | None
    pods: tuple[PodView, ...] | None = None


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
    _linked: dict[FleetKey, _Linked] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bursts = Bursts(self.agents.news, self.clock)

    async def reconcile(self, key: FleetKey) -> Outcome:
        """Raises NotLeading, ExecutionFailed and KubeError; the caller tries again. WentBack is final."""
        await self.bursts.over(key)
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
            waiting = self._warming_up(key, self._link(key, rollout, pods))
            if waiting is not None:
                return Outcome(waiting)
            began, news = self.clock(), self.agents.news(key)
            plan = self.planner(self._observe(key, rollout, pods), self.now())
            self.bursts.planned(key, news, self.clock() - began)
            try:
                return await self.executor.execute(key, rollout, plan)
            except Overtaken as error:
                log.info("%s/%s: planning again: %s", *key, error)
                await self._read_again(key)
        return Outcome(0.0)

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

    def _link(self, key: FleetKey, rollout: Rollout, pods: tuple[PodView, ...]) -> _Linked:
        """Links to every pod that has an address, the terminating ones too: they still report their draining."""
        audience = fleet_protocol.audience(rollout.uid)
        linked = self._linked.get(key)
        if linked is None or linked.audience != audience:
            if linked is not None:
                self.tokens.forget(linked.audience)
            linked = self._linked[key] = _Linked(audience, warming_since=self.clock())
        self.external.sync(key, rollout.model)
        if linked.pods is pods:
            return linked
        linked.pods = pods
        reachable = [pod for pod in pods if pod.ip and pod.phase not in ("Failed", "Succeeded")]
        target = partial(Target, audience=audience)
        self.agents.sync(
            key, {pod.uid: target(pod.uid, pod.name, pod.ip) for pod in reachable if pod.engine is not None}
        )
        self.routers.sync(key, {pod.uid: target(pod.uid, pod.name, pod.ip) for pod in reachable if pod.engine is None})
        return linked

    def _warming_up(self, key: FleetKey, linked: _Linked) -> float | None:
        """Seconds to wait for the first answers; None: no more. Planned without them, a fleet that serves would look
        like one that does not."""
        if linked.warming_since is None:
            return None
        left = linked.warming_since + WARM_UP_SECONDS - self.clock()
        settled = self.agents.settled(key) and self.routers.settled(key) and self.external.settled(key)
        if settled or left <= 0:
            linked.warming_since = None
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
        self.bursts.forget(key)
        linked = self._linked.pop(key, None)
        if linked is not None:
            self.tokens.forget(linked.audience)
