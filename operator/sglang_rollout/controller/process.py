"""The operator's process: its parts put together, started, watched over and stopped in order."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
import uuid
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes.aio.client import Configuration

from ..protocol import pod
from ..protocol.desired import AgentDesired
from ..protocol.report import AgentReport
from ..protocol.routing import RouterDesired, RouterReport
from ..transitions.plan import plan
from .applies import Applier
from .caches import Caches
from .cluster_keys import ClusterKeys
from .events import EventRecorder
from .executor import ExecutionFailed, Executor, NotLeading
from .external_router import ExternalRouters, keeper_on
from .http_server import OperatorServer
from .intake import Intake
from .kube import KubeClient
from .kube_errors import KubeError
from .lease import LeaderLease, LeaseLost
from .links import LinkContext, LinkPool
from .metrics import Metrics
from .plausibility import agent_problem, router_problem
from .pod_calls import Dialect
from .reconciler import Planner, Reconciler
from .resource_watch import watch_resources
from .rollouts import FleetKey, Rollouts, WentBack
from .settings import Settings
from .spec_timing import SpecTiming
from .tokens import FleetTokens
from .workqueue import WorkQueue

log = logging.getLogger(__name__)

AGENTS: Dialect[AgentReport] = Dialect(
    "agent", pod.AGENT_PORT, AgentReport, lambda report: report.agent_start, agent_problem
)
ROUTERS: Dialect[RouterReport] = Dialect(
    "router sidecar", pod.ROUTER_SIDECAR_PORT, RouterReport, lambda report: report.sidecar_start, router_problem
)
SHORTEST_REQUEUE = 0.02  # a plan that asks for less would keep the process busy alone
DRAIN_SECONDS = 10.0
STOP_SECONDS = 5.0
STUCK_SECONDS = 300.0
LAG_SECONDS = 0.5


class OperatorProcess:
    """run() returns the exit code. Everything that it starts has ended then."""

    def __init__(
        self,
        settings: Settings,
        configuration: Configuration,
        *,
        planner: Planner = plan,
    ) -> None:
        self.settings = settings
        self.stop = asyncio.Event()
        self.metrics = Metrics()
        self.queue: WorkQueue[FleetKey] = WorkQueue()
        self.rollouts = Rollouts()
        self._configuration = configuration
        self.kube = KubeClient(configuration, self.metrics.kube_call)
        identity = f"{settings.pod_name}_{uuid.uuid4().hex[:8]}"
        self.lease = LeaderLease(self.kube, settings.namespace, settings.lease_name, identity)
        self.events = EventRecorder(self.kube, settings.pod_name)
        self.caches = Caches(self.kube, settings.watch_namespaces, self.queue.add)
        caller = f"system:serviceaccount:{settings.namespace}:{settings.service_account}"
        self._keys = ClusterKeys(self.kube, caller, self._all)
        tokens = FleetTokens(self.kube, settings.namespace, settings.service_account)
        # For external routers; no proxy (trust_env): they are reached directly or not at all.
        self._session = aiohttp.ClientSession(trust_env=False)
        context = LinkContext(tokens, self.lease, self.metrics.agent_call)
        self._agents: LinkPool[AgentDesired, AgentReport] = LinkPool(AGENTS, context, self.queue.add)
        self._routers: LinkPool[RouterDesired, RouterReport] = LinkPool(ROUTERS, context, self.queue.add)
        self._external = ExternalRouters(
            keeper_on(self._session, self.lease), self.lease, Path(settings.credentials_dir), self.queue.add
        )
        timing = SpecTiming(
            lambda what, seconds: self.metrics.spec_to_effect.labels(what).observe(seconds), time.monotonic
        )
        self.intake = Intake(
            self.kube, settings.watch_namespaces, self.rollouts, self.queue, self.metrics, timing
        )  # fmt: skip
        executor = Executor(
            kube=self.kube,
            lease=self.lease,
            applier=Applier(self.kube, self.caches),
            agents=self._agents,
            routers=self._routers,
            external=self._external,
            events=self.events,
            on_written=self.intake.take,
        )
        self._reconciler = Reconciler(
            settings=settings,
            kube=self.kube,
            rollouts=self.rollouts,
            caches=self.caches,
            keys=self._keys,
            tokens=tokens,
            agents=self._agents,
            routers=self._routers,
            external=self._external,
            executor=executor,
            events=self.events,
            planner=planner,
            on_read=self.intake.take,
        )
        self.server = OperatorServer(
            settings.metrics_port,
            live=self.live_problem,
            ready=self.ready_problem,
            registry=self.metrics.registry,
            refresh=self._refresh_metrics,
        )
        self._listed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: BaseException | None = None
        self._stopped = False

    async def run(self) -> int:
        """Until a signal, `stop`, or a failure; 0 unless it failed."""
        try:
            await self.server.start()
            for informer in self.caches.informers:
                self._spawn(informer.run(), f"informer {informer}")
            self._spawn(self.events.run(), "events")
            self._spawn(self._measure_lag(), "loop lag")
            self._spawn(self._lead(), "lead")
            await self._listed_or_stopped()
            if not self.stop.is_set():
                await watch_resources(
                    self._configuration,
                    self.settings.watch_namespaces,
                    self.intake.take_event,
                    self.stop,
                    self._stop,
                )
        finally:
            await self._stop()
        if self._failure is not None:
            log.error("stopped: %s: %s", type(self._failure).__name__, self._failure)
        return 0 if self._failure is None else 1

    async def _listed_or_stopped(self) -> None:
        """The resources must have been listed once before they can be watched: without the CRD, kopf would watch
        nothing for ever. Until kopf runs, which has handlers of its own, a signal must end the process too."""
        loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.stop.set)
        waits = [asyncio.create_task(event.wait()) for event in (self._listed, self.stop)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    # Leading

    async def _lead(self) -> None:
        """Warm first, then wait to lead: a standby takes over with full caches."""
        await self._keys.load_until_there()
        await self.intake.first_list()
        self._listed.set()
        await self.caches.synced()
        self._spawn(self._keys.run(), "cluster keys")
        self._spawn(self.intake.resync(self.settings.resync_seconds), "resync")
        await self.lease.acquire()
        # The watch may be behind what the last leader wrote: a decision that is not seen yet would be undone.
        await self.intake.first_list()
        self.metrics.leader.set(1)
        self._all()
        for number in range(self.settings.workers):
            self._spawn(self._work(), f"worker {number}")
        await self.lease.keep()

    async def _work(self) -> None:
        while (item := await self.queue.get()) is not None:
            key, waited = item
            self.metrics.queue_latency.observe(waited)
            self.intake.begun(key)
            started = time.monotonic()
            result = "error"
            try:
                outcome = await self._reconciler.reconcile(key)
                self.queue.forget(key)
                self._come_back(key, outcome.again)
                result = "ok"
            except NotLeading as error:
                result = "not_leading"  # which is final: this process is about to end
                log.warning("%s/%s: %s", *key, error)
            except (ExecutionFailed, KubeError) as error:
                log.warning("%s/%s: %s; again in %.2f s", *key, error, self.queue.add_failed(key))
                self._come_back(key, error.again if isinstance(error, ExecutionFailed) else None)
            except WentBack:
                raise  # nothing that this process knows can be relied on: it starts again
            except Exception:
                log.exception("%s/%s: the pass failed; again in %.2f s", *key, self.queue.add_failed(key))
            finally:
                self.metrics.reconciles.labels(result).inc()
                self.metrics.reconcile_seconds.observe(time.monotonic() - started)
                self.queue.done(key)

    def _come_back(self, key: FleetKey, again: float | None) -> None:
        if again is not None:
            self.queue.add_after(key, max(again, SHORTEST_REQUEUE))

    def _all(self) -> None:
        for key in self.rollouts.known():
            self.queue.add(key)

    # Health

    def live_problem(self) -> str:
        now = time.monotonic()
        stuck = [str(informer) for informer in self.caches.informers if now - informer.stirred > STUCK_SECONDS]
        if stuck:
            return f"watches are stuck: {', '.join(stuck)}"
        if self.intake.missed_in_a_row >= 2:
            return "the watch of the resources is stuck: lists find changes that it does not tell"
        return ""

    def ready_problem(self) -> str:
        """Standbys are ready too: readiness is about having seen the cluster."""
        if not self._listed.is_set():
            return "the resources were not listed yet"
        if not self.caches.are_synced:
            return "children and pods were not listed yet"
        return ""

    def _refresh_metrics(self) -> None:
        self.metrics.queue_depth.set(self.queue.depth)
        self.metrics.leader.set(int(self.lease.leading))
        for informer in self.caches.informers:
            age = self.metrics.watch_age.labels(informer.kind.plural, informer.namespace or "")
            age.set(time.monotonic() - informer.heard)

    async def _measure_lag(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(LAG_SECONDS)
            self.metrics.loop_lag.set(max(0.0, time.monotonic() - before - LAG_SECONDS))

    # Stopping

    def _spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        """A task of the whole process: its failure ends the process."""
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.append(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            if self._failure is None and not self._stopped:
                self._failure = error
            self.stop.set()

    async def _stop(self) -> None:
        """Takes in nothing more, finishes what is being done, gives the lease back."""
        if self._stopped:
            return
        self._stopped = True
        self.stop.set()  # after a signal too: kopf would wait 5 s for its own task that waits for this
        self.queue.close()
        if not isinstance(self._failure, LeaseLost):
            await self._within(DRAIN_SECONDS, self.queue.drained(), "passes over fleets")
            await self._within(STOP_SECONDS, self.events.flush(), "events")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._within(STOP_SECONDS, self.lease.release(), "the lease's return")
        await asyncio.gather(self._agents.close(), self._routers.close(), self._external.close())
        await self._session.close()
        await self.server.stop()
        await self.kube.close()

    @staticmethod
    async def _within(seconds: float, step: Coroutine[Any, Any, None], what: str) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await step
                return
        log.warning("stopping without waiting longer for %s", what)
