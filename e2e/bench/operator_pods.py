"""What the operator's processes use in their pods."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from e2e.bench import usage
from e2e.bench.figures import Section
from e2e.cluster import Cluster
from e2e.deployment.chart import Chart


@dataclass(frozen=True)
class OperatorUsage:
    """Of the replica that leads, and of its standby."""

    leader: usage.Usage
    standby: usage.Usage


@dataclass(frozen=True)
class OperatorPods:
    cluster: Cluster
    leader: str
    standby: str

    @classmethod
    def of(cls, cluster: Cluster) -> OperatorPods:
        chart = Chart(cluster)
        leader = chart.leader()
        standbys = [name for pod in chart.pods() if (name := pod["metadata"]["name"]) != leader]
        return cls(cluster, leader, standbys[0])

    async def measured(self) -> OperatorUsage:
        leader, standby = await asyncio.gather(self._of(self.leader), self._of(self.standby))
        return OperatorUsage(leader, standby)

    async def _of(self, pod: str) -> usage.Usage:
        """Of the first process of the container: what runs by `kubectl exec` beside it does not count."""
        words = ("-n", Chart(self.cluster).namespace, "exec", pod, "--", "cat", "/proc/1/stat", "/proc/1/status")
        shown = await asyncio.to_thread(self.cluster.kubectl, *words)
        stat, _, status = shown.partition("\n")
        return usage.parse(time.monotonic(), stat, status)


def add_usage(section: Section, when: str, before: OperatorUsage, after: OperatorUsage) -> None:
    for role, first, last in (
        ("operator", before.leader, after.leader),
        ("its standby", before.standby, after.standby),
    ):
        section.add(f"{role}, {when}: CPU", [usage.cpu_percent(first, last)], "% of a core")
        section.add(f"{role}, {when}: RSS", usage.mebibytes([last.rss]), "MiB")
