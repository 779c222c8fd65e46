"""Reads /metrics of engines, which SGLang serves without a key: by the API server's pod proxy, and where that does not
reach the pod (network policies keep it away) or is not allowed, by a port-forward."""

from __future__ import annotations

import http.client
import threading
from typing import Any

import websocket
from kubernetes.client import ApiClient, CoreV1Api
from kubernetes.client.exceptions import ApiException
from kubernetes.stream import portforward

from ..kube_access.cluster import Cluster
from ..kube_access.failures import Failure, Forbidden, NotFound, Unreachable
from ..protocol.pod import ENGINE_PORT

PROXY_SECONDS = 4.0
FORWARD_SECONDS = 8.0
_RIGHTS = "top needs the right to get pods/proxy, or to create pods/portforward, in the fleet's namespace"


class MetricsReader:
    """For many pods from many threads. The proxy is not tried again once it failed where a port-forward did not."""

    def __init__(self, cluster: Cluster, port: int = ENGINE_PORT) -> None:
        self._cluster = cluster
        self._port = port
        self._proxy_works = True
        self._websockets = threading.Lock()

    def read(self, pod: str) -> str:
        """The text of /metrics of the engine in this pod. Raises Failure."""
        proxy_failure: Failure | None = None
        if self._proxy_works:
            try:
                path = self._cluster.pod_path(f"{pod}:{self._port}", "proxy/metrics")
                return self._cluster.connection.text(path, PROXY_SECONDS)
            except NotFound:
                raise
            except Failure as failure:
                proxy_failure = failure
        try:
            text = self._forwarded(pod)
        except Failure as failure:
            if proxy_failure is None:
                raise
            said = f"{proxy_failure.message}; by port-forward: {failure.message}"
            if isinstance(proxy_failure, Forbidden):
                raise Forbidden(f"{said}\n({_RIGHTS})") from failure
            raise Unreachable(said) from failure
        self._proxy_works = proxy_failure is None and self._proxy_works
        return text

    def _forwarded(self, pod: str) -> str:
        connection = self._cluster.connection
        # The library swaps a method of the client while it connects: one client for each call, one call at a time.
        with self._websockets:
            websocket.setdefaulttimeout(FORWARD_SECONDS)
            api = CoreV1Api(ApiClient(connection.client.configuration))
            try:
                forward: Any = portforward(
                    api.connect_get_namespaced_pod_portforward, pod, connection.namespace, ports=str(self._port)
                )
            except ApiException as error:
                raise _forward_failure(pod, error) from error
        try:
            http_connection = http.client.HTTPConnection("localhost", self._port, timeout=FORWARD_SECONDS)
            http_connection.sock = forward.socket(self._port)
            http_connection.sock.settimeout(FORWARD_SECONDS)
            http_connection.request("GET", "/metrics")
            answer = http_connection.getresponse()
            body = answer.read().decode(errors="replace")
            if answer.status != http.HTTPStatus.OK:
                raise Unreachable(f"{pod}: /metrics answered {answer.status}: {body[:200]}")
            return body
        except (OSError, http.client.HTTPException) as error:
            told = forward.error(self._port) or f"{type(error).__name__}: {error}"
            raise Unreachable(f"{pod}: the engine cannot be reached: {told}") from error
        finally:
            forward.close()


def _forward_failure(pod: str, error: ApiException) -> Failure:
    """The library tells a refused handshake by its text alone."""
    text = f"{error.reason}"
    if "403" in text or "Forbidden" in text:
        return Forbidden(f"pods/portforward of {pod} is forbidden")
    if "404" in text:
        return NotFound(f'pods "{pod}" not found')
    return Unreachable(f"{pod}: no port-forward: {text[:300]}")
