"""What the routers are seen to have, by their own reports: those in the fleet's pods, and an external one. One that is
not heard, or not since its last order, may have anything."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..api.names import CONTAINER_ROUTER
from ..protocol.routing import RouterDesired, RouterReport
from .engines import EngineView
from .observed import Observed, PodView

WORDS_SHOWN = 3


def reports_of(observed: Observed) -> list[RouterReport]:
    reports = [observed.routers[pod.uid] for pod in observed.router_pods if pod.uid in observed.routers]
    return reports if observed.external_router is None else [*reports, observed.external_router]


def listed_in(reports: Iterable[RouterReport]) -> frozenset[tuple[str, int]]:
    """Names and incarnations of the engines that a router has."""
    return frozenset((worker.engine, worker.incarnation) for report in reports for worker in report.registered)


def listed_names(observed: Observed) -> frozenset[str]:
    """Names of the engines that some router has: the status may not tell it yet."""
    return frozenset(worker.engine for report in reports_of(observed) for worker in report.registered)


def registered(engines: tuple[EngineView, ...], observed: Observed) -> frozenset[int]:
    """Engines that every router which is up has."""
    up = [report for report in reports_of(observed) if report.router_up]
    if not up:
        return frozenset()
    known = set.intersection(*({worker.engine for worker in report.registered} for report in up))
    return frozenset(engine.index for engine in engines if engine.name in known)


def unregistered(engines: tuple[EngineView, ...], observed: Observed) -> frozenset[int]:
    """Engines that no router has. A router that takes requests and is not heard, or not since its last order, may have
    any of them."""
    heard = observed.routers.keys() - observed.untold
    if any(takes_requests(pod, observed) and pod.uid not in heard for pod in observed.router_pods):
        return frozenset()
    if observed.external_untold:
        return frozenset()
    known = listed_names(observed)
    return frozenset(engine.index for engine in engines if engine.name not in known)


def in_step(observed: Observed, desired: RouterDesired) -> bool:
    """Whether every router that can take requests has exactly these workers."""
    if observed.external_untold:
        return False
    if observed.rollout.spec.router.external is not None:
        report = observed.external_router
        if report is None or report.desired_id != desired.id or not report.in_step:
            return False
    # Beside an external router: those of before, which still end.
    taking = [pod.uid for pod in observed.router_pods if takes_requests(pod, observed)]
    told = observed.routers
    return all(uid in told and uid not in observed.untold and _has(desired, told[uid]) for uid in taking)


def with_orders_heard(observed: Observed) -> Observed:
    """As if no order were on its way."""
    return replace(observed, untold=frozenset(), external_untold=bool(observed.parting))


def words(observed: Observed, desired: RouterDesired) -> tuple[str, ...]:
    """What routers that do not have exactly these workers say of it themselves, a few of them."""
    said = [*observed.parting]
    external = observed.external_router
    if external is not None and external.message:
        said.append(external.message)
    for pod in observed.router_pods:
        report = observed.routers.get(pod.uid)
        if report is not None and not _has(desired, report) and report.message:
            said.append(f"router pod {pod.name}: {report.message}")
        elif report is None and pod.uid in observed.silent:
            said.append(f"router pod {pod.name}: {observed.silent[pod.uid]}")
    return tuple(said[:WORDS_SHOWN])


def takes_requests(pod: PodView, observed: Observed) -> bool:
    """Whether requests may come through this router pod: its Service names it, or its router runs and serves
    connections of before, which it does for a while after its end was ordered, too. Of a pod that should end and is not
    heard the node is lost. One that is not running, not ready and not heard has no workers: its sidecar registers
    before it becomes ready."""
    if pod.phase in ("Failed", "Succeeded"):
        return False
    if pod.uid in observed.routers:
        return True
    runs = pod.ready or any(container.name == CONTAINER_ROUTER and container.running for container in pod.containers)
    return runs and (not pod.terminating or pod.uid not in observed.silent)


def _has(desired: RouterDesired, report: RouterReport) -> bool:
    # A router that is down has no workers at all; its sidecar registers the desired ones when it is back.
    return report.desired_id == desired.id and (report.in_step or not report.router_up)
