"""Which indexes are the fleet's engines: the first ones, and others in place of those whose pods cannot end.

A pod on a node that is gone stays Terminating, and its StatefulSet does not replace it until the node returns or its
Node object is deleted. Such an engine is replaced under a new index. The old one is removed as by a scale-down; it
had left the routers when its pod began to terminate, and nothing is force-deleted: what runs on an unreachable node
may still run. A replacement stays when the node returns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import datetime, timedelta
from itertools import count, islice

from .observed import PodView

# A pod that is still there so long after its grace has ended is not ended by the kubelet of its node.
LOST_AFTER = timedelta(seconds=60)


def choose(replicas: int, existing: Collection[int], lost: Collection[int]) -> frozenset[int]:
    """The indexes of the wanted engines. existing: that have a StatefulSet. lost: whose pods cannot end.

    The lowest existing ones stay, so that a scale-down takes the highest; new ones fill the gaps."""
    kept = sorted(index for index in existing if index not in lost)[:replicas]
    free = (index for index in count() if index not in existing and index not in lost)
    return frozenset([*kept, *islice(free, replicas - len(kept))])


def lost_pods(pods: Iterable[PodView], now: datetime) -> tuple[PodView, ...]:
    """Pods that should have been gone long ago."""
    return tuple(pod for pod in pods if pod.gone_by is not None and now >= pod.gone_by + LOST_AFTER)


def seconds_to_loss(pods: Iterable[PodView], now: datetime) -> float | None:
    """Until the next terminating pod counts as lost; None: there is none."""
    waits = [
        (pod.gone_by + LOST_AFTER - now).total_seconds()
        for pod in pods
        if pod.gone_by is not None and now < pod.gone_by + LOST_AFTER
    ]
    return min(waits, default=None)
