"""An HTTP server for many fake pods in one process: it knows the two calls of the pods' protocol and nothing else, so
that the fakes cost little beside what is measured."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from e2e.bench.fake_pods import FakePod
from sglang_rollout.protocol import pod
from sglang_rollout.protocol.fleet import Trust
from sglang_rollout.protocol.wire import MalformedMessage, dumps, loads
from sglang_rollout.serving.addressed import OtherPod
from sglang_rollout.serving.errors import Refusal, Unauthenticated
from sglang_rollout.serving.trust import verify

HEAD_END = b"\r\n\r\n"
BACKLOG = 64


class PodServer:
    """Answers at the addresses of all pods; a call is for the pod that it names. cpu: seconds that this process has
    spent on answering."""

    def __init__(self, trust: Trust) -> None:
        self.cpu = 0.0
        self._trust = trust
        self._verified: set[str] = set()
        self._pods: dict[str, FakePod[Any, Any]] = {}
        self._servers: list[asyncio.Server] = []

    async def start(self, pods: Iterable[FakePod[Any, Any]]) -> None:
        loop = asyncio.get_running_loop()
        for one in pods:
            self._pods[one.uid] = one
            self._servers.append(
                await loop.create_server(lambda: _Connection(self), one.address, one.port, backlog=BACKLOG)
            )

    async def stop(self) -> None:
        for one in self._pods.values():
            for waiting in tuple(one.waiting):
                waiting()
        for server in self._servers:
            server.close()

    def meant(self, call: Call) -> FakePod[Any, Any]:
        """The pod of a call by a caller that it trusts. A token is verified once: in a cluster each pod does that
        for itself, and here one process would do it for all of them. Raises Refusal."""
        token = call.token
        if token not in self._verified:
            verify(token, self._trust)
            self._verified.add(token)
        uid = call.query.get(pod.QUERY_POD, "")
        if uid not in self._pods:
            raise OtherPod(f"no pod {uid} is here")
        return self._pods[uid]


@dataclass(frozen=True)
class Call:
    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[bytes, bytes]
    body: bytes

    @property
    def token(self) -> str:
        """Raises Unauthenticated."""
        scheme, _, token = self.headers.get(b"authorization", b"").decode().partition(" ")
        if scheme != "Bearer":
            raise Unauthenticated("a ServiceAccount token is needed: Authorization: Bearer <token>")
        return token


class _Connection(asyncio.Protocol):
    """One call after the other, each answered before the next is sent."""

    def __init__(self, server: PodServer) -> None:
        self._server = server
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        began = time.thread_time()
        self._received += data
        while (call := _taken_from(self._received)) is not None:
            self._answer(call)
        self._server.cpu += time.thread_time() - began

    def _answer(self, call: Call) -> None:
        try:
            meant = self._server.meant(call)
            if call.method == "PUT":
                self._send(200, dumps(meant.accept(loads(meant.desired_type, call.body))))
            else:
                self._when_changed(meant, int(call.query.get("after", "-1")), float(call.query.get("wait", "0")))
        except (Refusal, MalformedMessage) as error:
            self._send(getattr(error, "status", 400), dumps({"error": str(error)}))

    def _when_changed(self, meant: FakePod[Any, Any], revision: int, seconds: float) -> None:
        """Sends the report as soon as its revision is another."""
        if meant.report.revision != revision:
            self._send(200, dumps(meant.report))
            return

        def over() -> None:
            began = time.thread_time()
            timer.cancel()
            meant.waiting.discard(over)
            self._send(200, dumps(meant.report))
            self._server.cpu += time.thread_time() - began

        timer = self._timer = asyncio.get_running_loop().call_later(seconds, over)
        meant.waiting.add(over)

    def _send(self, status: int, body: bytes) -> None:
        if self._transport is not None:
            head = f"HTTP/1.1 {status} -\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            self._transport.write(head.encode() + body)


def _taken_from(received: bytearray) -> Call | None:
    """The first call, taken away; None while it is not whole."""
    end = received.find(HEAD_END)
    if end < 0:
        return None
    first, *rest = bytes(received[:end]).split(b"\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in rest)}
    begin = end + len(HEAD_END)
    size = int(headers.get(b"content-length", b"0"))
    if len(received) < begin + size:
        return None
    body = bytes(received[begin : begin + size])
    del received[: begin + size]
    method, target, _ = first.decode().split(" ")
    path, _, query = target.partition("?")
    return Call(method, path, dict(parse_qsl(query)), headers, body)
