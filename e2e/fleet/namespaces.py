"""The namespaces that fleet tests make: which of them are there, so that a failure's account has all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from e2e.cluster import Cluster

present: set[str] = set()


@contextlib.contextmanager
def own_namespace(cluster: Cluster, name: str) -> Iterator[None]:
    """A new namespace, for the time of the block."""
    cluster.kubectl("delete", "namespace", name, "--ignore-not-found", "--timeout=180s", timeout=200)
    cluster.kubectl("create", "namespace", name)
    present.add(name)
    yield
    present.discard(name)
    cluster.kubectl("delete", "namespace", name, "--timeout=180s", timeout=200)
