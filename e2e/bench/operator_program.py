"""The operator as a program of its own, on a bare API server that has its CRD and its ServiceAccount."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from kubernetes.aio.client import Configuration
from kubernetes.aio.config import load_kube_config

from e2e.bench import usage
from e2e.bench.figures import Section
from e2e.cluster.apiserver import ApiServer
from e2e.cluster.errors import ClusterError
from e2e.cluster.process import wait_for
from sglang_rollout.controller.kube import KubeClient

REPOSITORY = Path(__file__).parents[2]
SYSTEM_NAMESPACE = "ops"
FLEET_NAMESPACE = "bench"
SERVICE_ACCOUNT = "operator"
STOP_SECONDS = 30.0
SETTLED_SECONDS = 3.0


@contextmanager
def api_server() -> Iterator[ApiServer]:
    """With the CRD, a namespace for the operator and one for fleets."""
    with ApiServer() as server:
        server.kubectl("apply", "--server-side", "-f", str(REPOSITORY / "crds"))
        wait_for("the CRD to be established", lambda: _established(server), timeout=60, every=0.1)
        for namespace in (SYSTEM_NAMESPACE, FLEET_NAMESPACE):
            server.kubectl("create", "namespace", namespace)
        server.kubectl("create", "serviceaccount", SERVICE_ACCOUNT, "-n", SYSTEM_NAMESPACE)
        yield server


def _established(server: ApiServer) -> bool:
    """`kubectl wait` fails on a CRD whose status has no conditions yet."""
    shown = "jsonpath={.items[*].status.conditions[?(@.type=='Established')].status}"
    return "True" in server.kubectl("get", "crd", "-o", shown, check=False)


@asynccontextmanager
async def client(server: ApiServer) -> AsyncIterator[KubeClient]:
    """As the API server's admin."""
    configuration = Configuration()
    await load_kube_config(config_file=str(server.kubeconfig), client_configuration=configuration)  # type: ignore[no-untyped-call]
    configuration.connection_pool_maxsize = 0
    kube = KubeClient(configuration)
    try:
        yield kube
    finally:
        await kube.close()


class OperatorProgram:
    """A running operator. profile: where it leaves cProfile's figures when it ends; it is slower by half with it."""

    def __init__(self, process: Process, log: Path) -> None:
        self._process = process
        self._log = log

    def usage(self) -> usage.Usage:
        return usage.of(self._process.pid)

    def complaints(self) -> list[str]:
        """Warnings and errors that it has logged."""
        lines = self._log.read_text(errors="replace").splitlines()
        return [line for line in lines if " WARNING " in line or " ERROR " in line]

    def must_run(self) -> None:
        """Raises ClusterError with the end of its log when it has ended."""
        if self._process.returncode is not None:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])
            raise ClusterError(f"the operator ended with code {self._process.returncode}:\n{tail}")


@asynccontextmanager
async def operator(server: ApiServer, profile: Path | None = None) -> AsyncIterator[OperatorProgram]:
    """For the time of the block."""
    module = ["-m", "sglang_rollout.controller"]
    argv = module if profile is None else ["-m", "cProfile", "-o", str(profile), *module]
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.environ.get("PYTHONPATH", os.pathsep.join(sys.path)),
        "KUBECONFIG": str(server.kubeconfig),
        "OPERATOR_NAMESPACE": SYSTEM_NAMESPACE,
        "POD_NAME": "operator-0",
        "OPERATOR_SERVICE_ACCOUNT": SERVICE_ACCOUNT,
        "WATCH_NAMESPACES": FLEET_NAMESPACE,
        "AGENT_IMAGE": "agent:1",
        "ROUTER_IMAGE": "router:1",
        "METRICS_PORT": "0",
    }
    with tempfile.TemporaryDirectory(prefix="rollout-bench-") as folder:
        log = Path(folder) / "operator.log"
        with log.open("wb") as stream:
            process = await asyncio.create_subprocess_exec(
                sys.executable, *argv, stdin=DEVNULL, stdout=stream, stderr=stream, env=environment
            )
        try:
            yield OperatorProgram(process, log)
        finally:
            await _stop(process)


async def add_idle(section: Section, what: str, program: OperatorProgram, seconds: float) -> None:
    """What the operator uses while nothing changes."""
    await asyncio.sleep(SETTLED_SECONDS)
    before = program.usage()
    await asyncio.sleep(seconds)
    after = program.usage()
    section.add(f"operator CPU, idle for {seconds:.0f} s, {what}", [usage.cpu_percent(before, after)], "% of a core")
    section.add(f"operator RSS, {what}", usage.mebibytes([after.rss]), "MiB")


def add_cpu(section: Section, what: str, before: usage.Usage, after: usage.Usage, times: int) -> None:
    """What the operator used for each of `times` times."""
    if times:
        section.add(f"operator CPU for {what}", [1e3 * (after.cpu - before.cpu) / times], "ms")


async def _stop(process: Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
