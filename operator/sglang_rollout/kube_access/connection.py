"""HTTP to the API server as the kubeconfig says, credential plug-ins included. Every call has a deadline, and every
failure is one of `failures` with a sentence to act on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import urllib3
from kubernetes.client import ApiClient, Configuration
from kubernetes.config import ConfigException, list_kube_config_contexts, load_incluster_config, load_kube_config
from yaml import YAMLError

from .failures import Conflict, Expired, Failure, Forbidden, NotFound, Refused, Unreachable

Object = dict[str, Any]

CONNECT_SECONDS = 5.0
CALL_SECONDS = 15.0
_POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class Connection:
    """One API server. namespace: the one that commands act on."""

    def __init__(self, client: Any, namespace: str) -> None:
        self.client = client
        self.namespace = namespace

    def call(self, method: str, path: str, body: Object | None = None, **query: str) -> Object:
        """The decoded answer. body: a merge patch, for PATCH."""
        with self._open(method, path, body, query, (CONNECT_SECONDS, CALL_SECONDS)) as answer:
            try:
                decoded: Object = json.loads(answer.data)
            except ValueError as error:
                raise Unreachable(f"{self.client.configuration.host} answered no JSON to {path}") from error
            return decoded

    def text(self, path: str, seconds: float, **query: str) -> str:
        """The body of an answer that is no object."""
        with self._open("GET", path, None, query, (CONNECT_SECONDS, seconds)) as answer:
            return bytes(answer.data).decode(errors="replace")

    def lines(self, path: str, silence: float | None, **query: str) -> Iterator[str]:
        """The lines of an answer as they come; silence: seconds without a byte after which Unreachable is raised,
        None: a quiet log is no error."""
        with self._open("GET", path, None, query, (CONNECT_SECONDS, silence)) as answer:
            pending = b""
            for chunk in answer.stream(amt=None):
                *complete, pending = (pending + chunk).split(b"\n")
                for line in complete:
                    yield line.decode(errors="replace")
            if pending:
                yield pending.decode(errors="replace")

    @contextmanager
    def _open(
        self,
        method: str,
        path: str,
        body: Object | None,
        query: dict[str, str],
        timeout: tuple[float, float | None],
    ) -> Iterator[Any]:
        headers: dict[str, str] = {"Accept": "application/json, */*"}
        if body is not None:
            headers["Content-Type"] = "application/merge-patch+json"
        host = self.client.configuration.host
        try:
            self.client.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
            answer = self.client.rest_client.pool_manager.request(
                method,
                f"{host}{path}" + (f"?{urlencode(query)}" if query else ""),
                body=None if body is None else json.dumps(body),
                headers=headers,
                timeout=urllib3.Timeout(connect=timeout[0], read=timeout[1]),
                retries=False,
                preload_content=False,
            )
            try:
                if answer.status >= HTTPStatus.BAD_REQUEST:
                    raise failure_of(answer.status, answer.data)
                yield answer
            finally:
                # What was not read to its end cannot be used again.
                answer.close()
        except urllib3.exceptions.HTTPError as error:
            raise Unreachable(f"no answer from the API server at {host}: {_cause(error)}") from error


def failure_of(status: int, body: bytes) -> Failure:
    """What an answer of 400 or more means; body: a meta/v1 Status, or anything."""
    message = body[:1000].decode(errors="replace").strip()
    details: Object = {}
    try:
        decoded = json.loads(body)
        if isinstance(decoded, dict):
            message, details = str(decoded.get("message") or message), decoded.get("details") or {}
    except ValueError:
        pass  # a proxy's page or an engine's answer: its beginning is the message
    if status == HTTPStatus.NOT_FOUND:
        if not details.get("name") and "could not find the requested resource" in message:
            message = f"{message}: is the operator installed in this cluster? (kubectl get crd | grep sglang)"
        return NotFound(message)
    if status == HTTPStatus.UNAUTHORIZED:
        return Forbidden(f"the API server does not know you ({message or 'Unauthorized'}): log in again")
    if status == HTTPStatus.FORBIDDEN:
        return Forbidden(message or "forbidden")
    if status == HTTPStatus.GONE:
        return Expired(message)
    if status == HTTPStatus.CONFLICT:
        return Conflict(message)
    if status in (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY):
        return Refused(message)
    return Unreachable(f"the API server answered {status}: {message}")


def connect(kubeconfig: str | None, context: str | None, namespace: str | None) -> Connection:
    """As kubectl chooses: --kubeconfig, else KUBECONFIG, else ~/.kube/config, else the ServiceAccount of the pod that
    we run in. namespace: absent, the context's own."""
    configuration = Configuration()
    configuration.retries = False
    try:
        if kubeconfig is None and context is None and _only_in_cluster():
            load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
            default = _POD_NAMESPACE.read_text().strip() if _POD_NAMESPACE.exists() else ""
        else:
            load_kube_config(kubeconfig, context, configuration, persist_config=False)  # type: ignore[no-untyped-call]
            default = _context_namespace(kubeconfig, context)
    except ConfigException as error:
        raise Unreachable(f"no cluster: {error}. Name a kubeconfig or a context, or set KUBECONFIG") from error
    except (YAMLError, TypeError, KeyError, AttributeError, ValueError) as error:  # the library looks at no shapes
        said = " ".join(str(error).split())
        raise Unreachable(f"the kubeconfig cannot be used: {said}. Name another one, or set KUBECONFIG") from error
    except OSError as error:
        raise Unreachable(f"the kubeconfig cannot be read: {error}") from error
    return Connection(ApiClient(configuration), namespace or default or "default")


def _only_in_cluster() -> bool:
    files = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    missing = not any(Path(name).exists() for name in files.split(os.pathsep) if name)
    return missing and "KUBERNETES_SERVICE_HOST" in os.environ


def _context_namespace(kubeconfig: str | None, context: str | None) -> str:
    contexts, current = list_kube_config_contexts(kubeconfig)  # type: ignore[no-untyped-call]
    wanted = context or (current or {}).get("name")
    found = next((one for one in contexts if one["name"] == wanted), None)
    return str(((found or {}).get("context") or {}).get("namespace") or "")


def _cause(error: BaseException) -> str:
    """The innermost reason: what wraps it repeats the address."""
    while (inner := getattr(error, "reason", None) or error.__cause__) and isinstance(inner, BaseException):
        error = inner
    return f"{error}".split(">: ", 1)[-1] or type(error).__name__
