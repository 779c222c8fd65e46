"""The client's rules of repetition and errors, against a server that misbehaves on order."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration

from sglang_rollout.controller import kube as kube_module
from sglang_rollout.controller.kinds import CONFIG_MAP, Object
from sglang_rollout.controller.kube import KubeClient
from sglang_rollout.controller.kube_errors import Conflict, Gone, KubeError, NotFound, Refused, Unreachable

OBJECT: Object = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "namespace": "ns"}}


@dataclass
class Server:
    """answers: what is given out, in order: (status, body, headers); the last one for ever."""

    answers: list[tuple[int, Any, dict[str, str]]] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)
    kube: KubeClient = field(init=False)
    calls: list[tuple[str, str, str]] = field(default_factory=list)

    def will(self, status: int, body: Any = None, **headers: str) -> None:
        self.answers.append((status, body if body is not None else {}, headers))

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request.method, request.path_qs))
        status, body, headers = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(body, bytes):
            return web.Response(status=status, body=body, headers=headers)
        return web.json_response(
            body, status=status, headers={name.replace("_", "-"): v for name, v in headers.items()}
        )


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", made.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    configuration = Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")
    made.kube = KubeClient(configuration, lambda verb, resource, code, _: made.calls.append((verb, resource, code)))
    yield made
    await made.kube.close()
    await runner.cleanup()


def failure(code: int, message: str = "no", reason: str = "Reason") -> Object:
    return {"kind": "Status", "code": code, "message": message, "reason": reason}


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
async def test_what_may_pass_is_tried_again(server: Server, status: int) -> None:
    server.will(status, failure(status))
    server.will(status, failure(status), Retry_After="0")
    server.will(200, OBJECT)
    assert await server.kube.get(CONFIG_MAP, "ns", "a") == OBJECT
    assert server.calls == [("get", "configmaps", str(status))] * 2 + [("get", "configmaps", "200")]


@pytest.mark.parametrize(
    ("status", "error"),
    [(400, Refused), (403, Refused), (422, Refused), (404, NotFound), (409, Conflict), (410, Gone), (401, KubeError)],
)
async def test_what_is_said_once_is_not_asked_twice(server: Server, status: int, error: type[KubeError]) -> None:
    server.will(status, failure(status, "the sentence"))
    with pytest.raises(error, match=r"get /api/v1/namespaces/ns/configmaps/a: .* the sentence") as raised:
        await server.kube.get(CONFIG_MAP, "ns", "a")
    assert (raised.value.status, raised.value.reason) == (status, "Reason")
    assert len(server.requests) == 1


async def test_an_optimistic_write_is_never_repeated(server: Server) -> None:
    """Its own first success would look like a conflict."""
    server.will(503, failure(503))
    guarded = {**OBJECT, "metadata": {**OBJECT["metadata"], "resourceVersion": "7"}}
    for write in (server.kube.apply(CONFIG_MAP, guarded, "test"), server.kube.replace(CONFIG_MAP, guarded)):
        server.requests.clear()
        with pytest.raises(KubeError):
            await write
        assert len(server.requests) == 1
    server.requests.clear()
    with pytest.raises(KubeError):
        await server.kube.apply(CONFIG_MAP, OBJECT, "test")
    assert len(server.requests) > 1


async def test_lists_come_in_pages_and_begin_again_when_the_pages_are_too_old(server: Server) -> None:
    page = {"metadata": {"continue": "more", "resourceVersion": "5"}, "items": [{"metadata": {"name": "a"}}]}
    whole = {"metadata": {"resourceVersion": "9"}, "items": [{"metadata": {"name": "b"}}]}
    server.will(200, page)
    server.will(410, failure(410))
    server.will(200, whole)
    items, version = await server.kube.list(CONFIG_MAP, "ns", labels="x=y")
    assert [item["metadata"]["name"] for item in items] == ["b"]
    assert items[0]["kind"] == "ConfigMap"
    assert version == "9"
    assert ["continue=more" in url for _, url in server.requests] == [False, True, False]
    assert all("labelSelector=x%3Dy" in url for _, url in server.requests)


def lines(*events: Any) -> bytes:
    return b"".join(json.dumps(event).encode() + b"\n" for event in events)


async def test_a_watch_that_lost_its_place_says_so(server: Server) -> None:
    server.will(
        200, lines({"type": "ADDED", "object": OBJECT}, {"type": "ERROR", "object": failure(410, "too old", "Expired")})
    )
    changes = server.kube.watch(CONFIG_MAP, "ns", "1")
    assert await anext(changes) == ("ADDED", OBJECT)
    with pytest.raises(Gone, match="too old"):
        await anext(changes)


async def test_a_watch_that_is_cut_in_the_middle_is_told(server: Server) -> None:
    server.will(200, b'{"type": "ADDED", "obj')
    with pytest.raises(Unreachable):
        await anext(server.kube.watch(CONFIG_MAP, "ns", "1"))


async def test_a_server_that_is_not_there_is_told_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_module, "CALL_SECONDS", 0.5)
    kube = KubeClient(Configuration(host="http://127.0.0.1:9"))
    with pytest.raises(Unreachable, match="get /api/v1/namespaces/ns/configmaps/a"):
        await kube.get(CONFIG_MAP, "ns", "a")
    await kube.close()


async def test_an_apply_with_an_unknown_field_can_never_succeed(server: Server) -> None:
    server.will(500, failure(500, "failed to create typed patch object (ns/a): .dta: field not declared in schema", ""))
    with pytest.raises(Refused, match="field not declared"):
        await server.kube.apply(CONFIG_MAP, OBJECT, "test")
    assert len(server.requests) == 1


KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: one
contexts: [{name: one, context: {cluster: one, user: one}}]
clusters: [{name: one, cluster: {server: "https://api.example:6443"}}]
users: [{name: one, user: {token: secret}}]
"""


@pytest.mark.parametrize(
    ("environment", "proxy"),
    [
        ({}, None),
        ({"HTTPS_PROXY": "http://proxy:3128"}, "http://proxy:3128"),
        ({"HTTP_PROXY": "http://proxy:3128"}, None),
        ({"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": ".example,10.0.0.0/8"}, None),
        ({"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": "other.test"}, "http://proxy:3128"),
    ],
)
async def test_the_environment_is_asked_for_a_proxy_once_and_not_at_every_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], proxy: str | None
) -> None:
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "config").write_text(KUBECONFIG)
    monkeypatch.setattr("kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config"))
    configuration = await kube_module.load_configuration()
    assert configuration.host == "https://api.example:6443"
    assert configuration.proxy == proxy
    assert configuration.client_session_kwargs == {"trust_env": False}
