"""The API of a cluster, and the pods behind it, over one local `kubectl proxy`.

The proxy does the login of any kubeconfig. Requests to routers and engines go through the API server's own service
and pod proxies: nothing has to be restarted when a pod goes, as a port-forward would, and a Service without ready
pods answers 503 at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from e2e.cluster import Cluster
from e2e.cluster.gobuild import binary
from e2e.deployment.errors import DeploymentError
from e2e.lifetime import ends_with_parent
from sglang_rollout.api.group import GROUP, PLURAL, VERSION

Object = dict[str, Any]

START_SECONDS = 20.0
CALL_SECONDS = 30.0
MERGE_PATCH = "application/merge-patch+json"


class NotFound(DeploymentError):
    """The API server knows no object of that name."""


class Connection:
    """Async calls to the API server and, through it, to pods. Made by `connect`."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client

    async def call(self, method: str, path: str, *, body: Any = None, patch: str | None = None, **query: str) -> Object:
        """One API call; returns the decoded object. Raises NotFound, or DeploymentError with the server's words."""
        headers = {"Content-Type": patch or "application/json"}
        content = None if body is None else json.dumps(body).encode()
        try:
            answer = await self.client.request(
                method, path, content=content, params=query, headers=headers, timeout=CALL_SECONDS
            )
        except httpx.HTTPError as error:
            raise DeploymentError(f"{method} {path}: {type(error).__name__}: {error}") from error
        if answer.status_code == 404:
            raise NotFound(f"{method} {path}: {_message(answer)}")
        if answer.is_error:
            raise DeploymentError(f"{method} {path}: {answer.status_code}: {_message(answer)}")
        decoded: Object = answer.json()
        return decoded

    async def get(self, path: str, **query: str) -> Object:
        return await self.call("GET", path, **query)

    async def items(self, path: str, selector: str = "") -> list[Object]:
        """The objects of a list."""
        listed = await self.get(path, **({"labelSelector": selector} if selector else {}))
        items: list[Object] = listed["items"]
        return items

    async def create(self, path: str, body: Object) -> Object:
        return await self.call("POST", path, body=body)

    async def merge(self, path: str, body: Object) -> Object:
        """JSON merge patch, as `kubectl patch --type=merge`."""
        return await self.call("PATCH", path, body=body, patch=MERGE_PATCH)

    async def delete(self, path: str, *, grace_seconds: int | None = None) -> None:
        """Ask for the deletion; what is gone already is no error."""
        body = {} if grace_seconds is None else {"gracePeriodSeconds": grace_seconds}
        with contextlib.suppress(NotFound):
            await self.call("DELETE", path, body=body)


def rollouts_path(namespace: str, name: str = "") -> str:
    return f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{PLURAL}" + (f"/{name}" if name else "")


def core_path(namespace: str, plural: str, name: str = "") -> str:
    return f"/api/v1/namespaces/{namespace}/{plural}" + (f"/{name}" if name else "")


def service_url(namespace: str, service: str, port: int) -> str:
    """Prefix of the paths of an HTTP server behind a Service."""
    return core_path(namespace, "services", f"{service}:{port}") + "/proxy"


def pod_url(namespace: str, pod: str, port: int) -> str:
    """Prefix of the paths of an HTTP server in a pod, ready or not."""
    return core_path(namespace, "pods", f"{pod}:{port}") + "/proxy"


@contextlib.asynccontextmanager
async def connect(cluster: Cluster) -> AsyncIterator[Connection]:
    """A connection for the time of the block."""
    with tempfile.TemporaryDirectory(prefix="rollout-proxy-") as folder:
        socket = Path(folder) / "api.sock"
        log = Path(folder) / "log"
        process = _start_proxy(cluster, socket, log)
        try:
            await _wait_for_socket(socket, process, log)
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=16, keepalive_expiry=30)
            transport = httpx.AsyncHTTPTransport(uds=str(socket), limits=limits)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                yield Connection(client)
        finally:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _start_proxy(cluster: Cluster, socket: Path, log: Path) -> subprocess.Popen[bytes]:
    kubectl = str(binary(cluster.layout, "kubectl"))
    argv = [kubectl, f"--kubeconfig={cluster.kubeconfig}", "proxy", f"--unix-socket={socket}"]
    with log.open("wb") as stream:
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, preexec_fn=ends_with_parent(signal.SIGKILL)
        )


async def _wait_for_socket(socket: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not socket.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise DeploymentError(f"kubectl proxy does not start: {log.read_text().strip()[-500:]}")
        await asyncio.sleep(0.05)


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:500]
