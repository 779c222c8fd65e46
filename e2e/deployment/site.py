"""Where the fleets run: the local cluster with SGLang and the models on its nodes and our images in them, or the
caller's own cluster (CLUSTER=current), which takes images from a registry."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from e2e.cluster import Cluster, ClusterError, CurrentCluster, open_cluster
from e2e.cluster.kind import Mount
from e2e.images.build import build_all
from e2e.images.catalogue import IMAGES
from e2e.sglang_cpu import environment, models

CHART_IMAGES = ("operator", "agent", "router")
ENGINE_IMAGE = "sglang-rollout/engine-cpu:dev"
"""The name in the examples; on the local cluster it is the engine image that was built here."""


@dataclass(frozen=True)
class Site:
    """A cluster that is up, and the references of our images as its nodes know them."""

    cluster: Cluster
    images: Mapping[str, str]


def local_mounts() -> list[Mount]:
    """What every node of the local cluster sees; SGLang and the models must be prepared."""
    environment.interpreter()
    return [
        Mount(str(environment.folder()), environment.MOUNT_PATH),
        Mount(str(models.folder()), models.MOUNT_PATH),
    ]


def bring_up() -> Cluster:
    """The cluster, up; a healthy local one is kept."""
    current = os.environ.get("CLUSTER") == "current"
    cluster = open_cluster(mounts=None if current else local_mounts())
    cluster.up()
    return cluster


def with_images(cluster: Cluster) -> Site:
    """Build the images and put them into the nodes. A caller's own cluster gets references below IMAGE_PREFIX."""
    if isinstance(cluster, CurrentCluster):
        return Site(cluster, registry_images())
    images = build_all()
    cluster.docker("tag", images["engine-cpu"], ENGINE_IMAGE)
    cluster.load(*(images[name] for name in CHART_IMAGES), ENGINE_IMAGE)
    return Site(cluster, images)


def registry_images() -> dict[str, str]:
    """References below $IMAGE_PREFIX, with the tags that `make images` gives. Raises ClusterError without it."""
    prefix = os.environ.get("IMAGE_PREFIX", "").rstrip("/")
    if not prefix:
        raise ClusterError(
            "CLUSTER=current takes images from a registry: push what `make images` builds, "
            "and give the registry and folder that hold operator, agent and router as IMAGE_PREFIX="
        )
    return {name: f"{prefix}/{name}:{IMAGES[name].snapshot().ref.rpartition(':')[2]}" for name in CHART_IMAGES}


def main() -> int:
    """Start the cluster and put the images into it; says how to use it."""
    try:
        where = with_images(bring_up())
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for name, reference in where.images.items():
        print(f"{name}={reference}")
    print(f"export KUBECONFIG={where.cluster.kubeconfig}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
