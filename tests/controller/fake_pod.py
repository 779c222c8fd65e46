"""The program of one pod as the operator sees it: desired state in, long-polled report out. Knobs make it misbehave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from aiohttp import web

from sglang_rollout.protocol import pod
from sglang_rollout.protocol.desired import AgentDesired
from sglang_rollout.protocol.report import AgentReport
from sglang_rollout.protocol.wire import loads
from sglang_rollout.serving.errors import Refusal, Superseded, Unauthenticated, json_errors
from sglang_rollout.serving.longpoll import ReportBoard, report_handler, report_response
from sglang_rollout.serving.trust import bearer_token


class FakePod:
    """heard: every desired state that was accepted; serials: theirs.

    check_token: raises Refusal for a token that it does not like.

    delay: seconds before any PUT is heard. loses_answers: so many next PUTs are heard and not answered. term: the
    highest lease term seen.
    """

    def __init__(self, uid: str, desired: type[Any] = AgentDesired, report: Any = None) -> None:
        self.uid = uid
        self.heard: list[Any] = []
        self.serials: list[int] = []
        self.tokens: list[str] = []
        self.delay = 0.0
        self.loses_answers = 0
        self.term = 0
        self.refuse = ""
        self.check_token: Callable[[str], None] = lambda _: None
        self.on_desired: Callable[[Any], None] = lambda _: None
        self._desired = desired
        self.board: ReportBoard[Any] = ReportBoard(report or AgentReport(0, "start-1", uid, 0))
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> FakePod:
        app = web.Application(middlewares=[json_errors, self._guard])
        app.router.add_get(pod.PATH_REPORT, report_handler(self.board))
        app.router.add_put(pod.PATH_DESIRED, self._put)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def report(self, **changes: Any) -> None:
        self.board.publish(replace(self.board.report, **changes))

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        token = bearer_token(request)
        self.tokens.append(token)
        self.check_token(token)
        if self.refuse:
            raise Refusal(self.refuse)
        response: web.StreamResponse = await handler(request)
        return response

    async def _put(self, request: web.Request) -> web.Response:
        await asyncio.sleep(self.delay)
        desired = loads(self._desired, await request.read())
        if desired.lease_term < self.term:
            raise Superseded(f"lease term {desired.lease_term} is over")
        self.term = desired.lease_term
        self.heard.append(replace(desired, serial=0))
        self.serials.append(desired.serial)
        self.report(lease_term=self.term)
        self.on_desired(desired)
        if self.loses_answers:
            self.loses_answers -= 1
            assert request.transport is not None
            request.transport.abort()
        return report_response(self.board.report)


def refuse_token(bad: str) -> Callable[[str], None]:
    def check(token: str) -> None:
        if token == bad:
            raise Unauthenticated("the token is not valid here")

    return check
