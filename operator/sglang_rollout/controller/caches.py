"""Local copies of everything that fleets are made of, and what they say about one fleet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from ..api import names
from ..transitions.observed import ChildView, PodView
from .informer import Informer, Store
from .kinds import CHILD_KINDS, CORE_EVENT, POD
from .kube import KubeClient
from .projections import Child, CreateFailure, child, create_failure, failed_object, fleet_of, pod_view

FleetKey = tuple[str, str]
OURS = f"{names.LABEL_MANAGED_BY}={names.MANAGED_BY}"
FAILED_CREATE = "reason=FailedCreate,involvedObject.kind=StatefulSet"
# The API server sends no bookmarks for events: a watch must end before its silence is taken for a dead connection.
EVENTS_WATCH_SECONDS = (40.0, 70.0)
FAILURE_COUNTS = timedelta(minutes=20)  # the StatefulSet controller tries, and says so, at least every 17 minutes


class Caches:
    """Stores and the informers that fill them. on_change: told which fleet has changed.

    namespaces: empty: all of the cluster.
    """

    def __init__(self, kube: KubeClient, namespaces: Iterable[str], on_change: Callable[[FleetKey], None]) -> None:
        self.pods: Store[PodView] = Store()
        self.children: dict[str, Store[Child]] = {kind.kind: Store() for kind in CHILD_KINDS}
        self.failures: Store[CreateFailure] = Store()
        self._on_change = on_change
        self._pods_of: dict[FleetKey, tuple[int, tuple[PodView, ...]]] = {}
        self.informers: list[Informer[PodView] | Informer[Child] | Informer[CreateFailure]] = []
        for namespace in tuple(namespaces) or (None,):
            self.informers.append(
                Informer(
                    kube, POD, namespace, self.pods,
                    project=pod_view, group_of=fleet_of, on_change=on_change, labels=OURS,
                )
            )  # fmt: skip
            for kind in CHILD_KINDS:
                self.informers.append(
                    Informer(
                        kube, kind, namespace, self.children[kind.kind],
                        project=child, group_of=fleet_of, on_change=on_change, labels=OURS,
                    )
                )  # fmt: skip
            self.informers.append(
                Informer(
                    kube, CORE_EVENT, namespace, self.failures,
                    project=create_failure, group_of=failed_object, on_change=self._failed, fields=FAILED_CREATE,
                    watch_seconds=EVENTS_WATCH_SECONDS,
                )
            )  # fmt: skip

    async def synced(self) -> None:
        for informer in self.informers:
            await informer.synced.wait()

    @property
    def are_synced(self) -> bool:
        return all(informer.synced.is_set() for informer in self.informers)

    def pods_of(self, fleet: FleetKey) -> tuple[PodView, ...]:
        """The same tuple as before while no pod has changed."""
        changes, pods = self._pods_of.get(fleet, (-1, ()))
        if changes != self.pods.changes:
            found = tuple(sorted((entry.value for entry in self.pods.group(fleet).values()), key=lambda pod: pod.name))
            pods = pods if found == pods else found
            self._pods_of[fleet] = self.pods.changes, pods
        return pods

    def forget(self, fleet: FleetKey) -> None:
        """The resource is gone."""
        self._pods_of.pop(fleet, None)

    def child(self, kind: str, namespace: str, name: str) -> Child | None:
        entry = self.children[kind].get((namespace, name))
        return None if entry is None else entry.value

    def children_of(self, fleet: FleetKey, now: datetime) -> Mapping[tuple[str, str], ChildView]:
        return {
            (kind, name): self._view(entry.value, fleet[0], now)
            for kind, store in self.children.items()
            for (_, name), entry in store.group(fleet).items()
        }

    def _view(self, found: Child, namespace: str, now: datetime) -> ChildView:
        """With the reason why it makes no pods, where only an event tells it."""
        if not found.short_of_pods:
            return found.view
        told = [entry.value for entry in self.failures.group((namespace, found.view.name)).values()]
        recent = [
            failure
            for failure in told
            if failure.statefulset_uid == found.view.uid and now - _moment(failure.seen) < FAILURE_COUNTS
        ]
        if not recent:
            return found.view
        latest = max(recent, key=lambda failure: _moment(failure.seen))
        return replace(found.view, failure=latest.message)

    def _failed(self, statefulset: tuple[str, str]) -> None:
        entry = self.children["StatefulSet"].get(statefulset)
        if entry is not None:
            self._on_change(entry.group)


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text) if text else datetime.min.replace(tzinfo=UTC)
