"""A thin client of the Kubernetes API over plain JSON objects. Connection, TLS and credentials are those of
kubernetes.aio; every call has a deadline and is counted."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlencode, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from kubernetes.aio.client import Configuration
from kubernetes.aio.client.rest import RESTClientObject
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

from .kinds import Kind, Object
from .kube_errors import Gone, KubeError, Refused, Unreachable, error_of

CALL_SECONDS = 10.0
LIST_SECONDS = 60.0
LIST_CHUNK = 500
WATCH_SILENCE_SECONDS = 80.0  # the server sends a bookmark about every 60 s
ATTEMPTS = 4  # of calls that may be repeated
IN_FLIGHT = 64  # calls at once, watches aside
RETRIED = frozenset({429, 500, 502, 503, 504})

OnCall = Callable[[str, str, str, float], None]
"""Told of every call: verb, plural of the kind, status code (or "error"), seconds."""


async def load_configuration() -> Configuration:
    """Of the pod's ServiceAccount, else of the kubeconfig of KUBECONFIG. Raises ConfigException."""
    configuration = Configuration()
    try:
        load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except ConfigException:
        await load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    configuration.connection_pool_maxsize = 0  # no limit: watches hold connections; calls are bounded by IN_FLIGHT
    # aiohttp would read the environment's proxies and a netrc file in two threads at every call: it is read once here.
    configuration.client_session_kwargs = {"trust_env": False}
    configuration.proxy = configuration.proxy or _proxy_of(configuration.host)
    return configuration


def _proxy_of(url: str) -> str | None:
    """The proxy that HTTPS_PROXY, HTTP_PROXY and NO_PROXY name for this URL."""
    parts = urlsplit(url)
    if proxy_bypass(parts.netloc):
        return None
    return getproxies().get(parts.scheme)


async def authorization(configuration: Configuration) -> str:
    """The Authorization header as it is to be now (tokens are read again as they rotate); empty: there is none."""
    return await configuration.get_api_key_with_prefix("BearerToken", alias="authorization") or ""


class KubeClient:
    """One connection pool to one API server. Errors are those of kube_errors."""

    def __init__(self, configuration: Configuration, on_call: OnCall = lambda *_: None) -> None:
        self.configuration = configuration
        self._rest = RESTClientObject(configuration)
        self._on_call = on_call
        self._slots = asyncio.Semaphore(IN_FLIGHT)

    async def close(self) -> None:
        await self._rest.close()

    # Reading

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Object:
        return await self._call("get", kind.plural, "GET", kind.path(namespace, name))

    async def get_path(self, path: str) -> Object:
        """Anything that is not an object of a kind: /openid/v1/jwks, /version."""
        return await self._call("get", path.strip("/").replace("/", "_"), "GET", path)

    async def list(
        self, kind: Kind, namespace: str | None = None, labels: str = "", fields: str = ""
    ) -> tuple[list[Object], str]:
        """All objects as of one moment, and its resourceVersion. Their kind and apiVersion are filled in, which
        lists leave out."""
        query = {"limit": str(LIST_CHUNK), **_selectors(labels, fields)}
        items: list[Object] = []
        while True:
            try:
                page = await self._call("list", kind.plural, "GET", kind.path(namespace), query, seconds=LIST_SECONDS)
            except Gone:
                if "continue" not in query:
                    raise
                # The moment that the pages belong to is too long ago: all at once then.
                items, query = [], _selectors(labels, fields)
                continue
            items += page.get("items") or []
            token = page["metadata"].get("continue")
            if not token:
                break
            query["continue"] = token
        for item in items:
            item.setdefault("kind", kind.kind)
            item.setdefault("apiVersion", kind.api_version)
        return items, page["metadata"].get("resourceVersion", "")

    async def watch(
        self,
        kind: Kind,
        namespace: str | None,
        since: str,
        labels: str = "",
        fields: str = "",
        seconds: float = 300.0,
    ) -> AsyncGenerator[tuple[str, Object]]:
        """(type, object) of each change after resourceVersion `since`, bookmarks included, for about `seconds`.
        Raises Gone when `since` is too old, Unreachable when nothing came for too long."""
        query = {
            "watch": "1",
            "resourceVersion": since,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(max(1, int(seconds))),
            **_selectors(labels, fields),
        }
        timeout = aiohttp.ClientTimeout(
            total=seconds + 30.0, sock_connect=CALL_SECONDS, sock_read=min(WATCH_SILENCE_SECONDS, seconds + 30.0)
        )
        path = f"{kind.path(namespace)}?{urlencode(query)}"
        async with self._answer("watch", kind.plural, "GET", path, timeout=timeout) as response:
            try:
                async for line in response.content:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        status = event["object"]
                        raise error_of(f"watch {kind.plural}", int(status.get("code", 0)), json.dumps(status).encode())
                    yield event["type"], event["object"]
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                raise Unreachable(f"watch {kind.plural}: {type(error).__name__}: {error}") from error

    # Writing

    async def apply(
        self, kind: Kind, manifest: Object, manager: str, subresource: str | None = None, *, strict: bool = True
    ) -> Object:
        """Server-side apply, forced: the fields of `manifest` become ours. With metadata.resourceVersion in it,
        Conflict is raised when the object has another one. strict: unknown fields are refused, else dropped."""
        metadata = manifest["metadata"]
        query = {"fieldManager": manager, "force": "true", "fieldValidation": "Strict" if strict else "Ignore"}
        return await self._call(
            "apply",
            kind.plural + (f"/{subresource}" if subresource else ""),
            "PATCH",
            kind.path(metadata.get("namespace"), metadata["name"], subresource),
            query,
            manifest,
            content_type="application/apply-patch+yaml",
            # A repeated call that carries a resourceVersion could take its own first success for a conflict.
            repeat="resourceVersion" not in metadata,
        )

    async def create(
        self, kind: Kind, value: Object, subresource: str | None = None, name: str | None = None
    ) -> Object:
        """Not repeated on errors. Conflict: it is there already."""
        path = kind.path(value["metadata"].get("namespace"), name, subresource)
        return await self._call("create", kind.plural, "POST", path, body=value, repeat=False)

    async def replace(self, kind: Kind, value: Object, seconds: float = CALL_SECONDS) -> Object:
        """Conflict when it was changed after the resourceVersion in `value`. Not repeated on errors."""
        metadata = value["metadata"]
        path = kind.path(metadata.get("namespace"), metadata["name"])
        return await self._call("replace", kind.plural, "PUT", path, body=value, repeat=False, seconds=seconds)

    async def merge(self, kind: Kind, namespace: str, name: str, patch: Object) -> Object:
        """JSON merge patch. Not repeated on errors."""
        return await self._call(
            "merge",
            kind.plural,
            "PATCH",
            kind.path(namespace, name),
            body=patch,
            content_type="application/merge-patch+json",
            repeat=False,
        )

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """Deletes the object if it still has this UID, dependents in the background. NotFound: it is gone;
        Conflict: another one has its name now."""
        body = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "propagationPolicy": "Background",
            "preconditions": {"uid": uid},
        }
        await self._call("delete", kind.plural, "DELETE", kind.path(namespace, name), body=body)

    # How calls are made

    async def _call(
        self,
        verb: str,
        resource: str,
        method: str,
        path: str,
        query: dict[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
        repeat: bool = True,
        seconds: float = CALL_SECONDS,
    ) -> Object:
        deadline = time.monotonic() + seconds
        url = f"{path}?{urlencode(query)}" if query else path
        for attempt in range(1, ATTEMPTS + 1):
            left = max(0.01, deadline - time.monotonic())
            try:
                async with (
                    self._slots,
                    self._answer(
                        verb, resource, method, url, body, content_type, aiohttp.ClientTimeout(total=left)
                    ) as response,
                ):
                    answer: Object = json.loads(await response.read())
                    return answer
            except KubeError as error:
                pause = error.retry_after or 0.1 * 2**attempt * random.uniform(0.5, 1.0)  # noqa: S311 jitter
                again = isinstance(error, Unreachable) or (error.status in RETRIED and not isinstance(error, Refused))
                if not (repeat and again) or attempt == ATTEMPTS or time.monotonic() + pause >= deadline:
                    raise
            await asyncio.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    @asynccontextmanager
    async def _answer(
        self,
        verb: str,
        resource: str,
        method: str,
        path: str,
        body: Any = None,
        content_type: str = "application/json",
        timeout: aiohttp.ClientTimeout | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The response to one attempt, if it is a success. Raises KubeError."""
        started = time.monotonic()
        code = "error"
        call = f"{verb} {path.partition('?')[0]}"
        response: aiohttp.ClientResponse | None = None
        try:
            headers = {"Content-Type": content_type, "Accept": "application/json, */*", **await self._authorization()}
            answer = await self._rest.request(  # type: ignore[no-untyped-call]
                method, f"{self.configuration.host.rstrip('/')}{path}", headers, body, _request_timeout=timeout
            )
            response = answer.response
            code = str(response.status)
            if response.status >= 400:
                raise error_of(call, response.status, await response.read(), response.headers.get("Retry-After"))
            if verb == "watch":
                self._on_call(verb, resource, code, time.monotonic() - started)
            yield response
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            code = "error"
            raise Unreachable(f"{call}: {type(error).__name__}: {error}") from error
        except ValueError as error:
            raise Refused(f"{call}: the answer is not JSON: {error}") from error
        finally:
            if response is not None:
                response.close() if verb == "watch" else response.release()
            if verb != "watch" or code != "200":
                self._on_call(verb, resource, code, time.monotonic() - started)

    async def _authorization(self) -> dict[str, str]:
        header = await authorization(self.configuration)
        return {"Authorization": header} if header else {}


def _selectors(labels: str, fields: str) -> dict[str, str]:
    return {**({"labelSelector": labels} if labels else {}), **({"fieldSelector": fields} if fields else {})}
