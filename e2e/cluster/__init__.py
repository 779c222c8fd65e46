"""A real Kubernetes on one machine (kind, three nodes) and a bare API server, for demos, tests and benchmarks."""

from __future__ import annotations

from e2e.cluster.cluster import Cluster, CurrentCluster, open_cluster
from e2e.cluster.errors import ClusterError

__all__ = ["Cluster", "ClusterError", "CurrentCluster", "open_cluster"]
