"""python -m e2e.demo: from nothing to the main job on a real cluster. `down` takes everything away again."""

from __future__ import annotations

import argparse
import asyncio
import sys

from e2e import prepare
from e2e.cluster import Cluster, ClusterError, CurrentCluster, open_cluster
from e2e.demo.screen import Screen
from e2e.demo.settings import NAMESPACE, NEW_VERSION, Settings
from e2e.demo.story import Story
from e2e.deployment import diagnostics, site
from e2e.deployment.chart import NAMESPACE as OPERATOR_NAMESPACE
from e2e.deployment.chart import Chart
from e2e.deployment.connection import connect
from e2e.deployment.site import Site
from e2e.lifetime import terminated_as_interrupted


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m e2e.demo", description=__doc__)
    parser.add_argument("verb", nargs="?", choices=("up", "down"), default="up")
    options = parser.parse_args()
    terminated_as_interrupted()
    try:
        return down() if options.verb == "down" else show(Screen())
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def show(screen: Screen) -> int:
    """The demo; returns the exit code."""
    settings = Settings.from_environment()
    cluster = open_cluster()
    try:
        where = set_up(screen, settings)
        cluster = where.cluster
        asyncio.run(tell(screen, settings, where))
    except ClusterError as error:
        screen.failure(str(error), diagnose(cluster))
        return 1
    screen.summary()
    return 0


def set_up(screen: Screen, settings: Settings) -> Site:
    """A cluster with our operator in it."""
    if not settings.current:
        with screen.step("prepare: cluster programs, SGLang for CPU, models, images (cached)") as step:
            prepare.everything(step.now)
    with screen.step("cluster") as step:
        cluster = site.bring_up()
        step.result = f"KUBECONFIG={cluster.kubeconfig}"
    with screen.step("images"):
        where = site.with_images(cluster)
    with screen.step("install the CRD and the operator from the chart (2 replicas)") as step:
        step.command(f"helm install sglang-rollout charts/sglang-rollout -n {OPERATOR_NAMESPACE}")
        Chart(cluster).install(where.images)
        step.result = f"{len(Chart(cluster).pods())} pods are ready"
    return where


async def tell(screen: Screen, settings: Settings, where: Site) -> None:
    """The main job, in a namespace of its own."""
    cluster = where.cluster
    cluster.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", "--timeout=180s", timeout=200)
    cluster.kubectl("create", "namespace", NAMESPACE)
    async with connect(cluster) as connection:
        story = Story(
            screen, cluster, connection, NAMESPACE, settings.resource, NEW_VERSION, new_path=settings.weights_path
        )
        await story.tell()
    cluster.kubectl("delete", "namespace", NAMESPACE, "--timeout=60s", timeout=90)


def diagnose(cluster: Cluster) -> str:
    """What the cluster says, as far as there is one."""
    try:
        if not cluster.healthy():
            return ""
        return diagnostics.collect(cluster, (NAMESPACE, OPERATOR_NAMESPACE), "demo")[0]
    except (ClusterError, OSError) as error:
        return f"(the cluster says nothing: {error})"


def down() -> int:
    """Everything that the demo made: the local cluster; in a cluster that is not ours the namespace and the chart."""
    cluster = open_cluster()
    if isinstance(cluster, CurrentCluster):
        cluster.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", "--timeout=180s", timeout=200)
        Chart(cluster).uninstall()
    cluster.down()
    return 0


if __name__ == "__main__":
    sys.exit(main())
