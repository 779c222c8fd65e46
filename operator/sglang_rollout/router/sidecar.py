"""The router's sidecar: takes the desired workers from the operator and keeps the router beside it in step, also
when the router starts again while the operator is away."""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from aiohttp import web

from sglang_rollout.protocol.pod import PATH_DESIRED, PATH_LIVE, PATH_READY, PATH_REPORT
from sglang_rollout.protocol.routing import RouterDesired, RouterReport
from sglang_rollout.protocol.wire import dumps, loads
from sglang_rollout.serving.addressed import this_pod_only
from sglang_rollout.serving.errors import error_response, json_errors
from sglang_rollout.serving.fleet_file import FleetFile
from sglang_rollout.serving.longpoll import ReportBoard, report_handler, report_response
from sglang_rollout.serving.private_file import write_private
from sglang_rollout.serving.terms import LeaseTerms
from sglang_rollout.serving.trust import callers_only

from .keeper import MembershipKeeper
from .settings import CONTROL_KEY, DESIRED, LEASE_TERM, SidecarSettings

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5  # how often the router's workers are looked at
FIRST_LOOK_SECONDS = 0.05  # once it is out of step; doubled with each look that finds it so still
MAX_BODY_BYTES = 32 * 1024 * 1024


class Sidecar:
    """Holds the desired set and the report; `run` is the loop that brings the router to it."""

    def __init__(self, settings: SidecarSettings, keeper: MembershipKeeper) -> None:
        self._file = settings.run_dir / DESIRED
        self._terms = LeaseTerms(settings.run_dir / LEASE_TERM)
        self._desired = loads(RouterDesired, self._file.read_bytes()) if self._file.exists() else None
        self._keeper = keeper
        self._changed = asyncio.Event()
        self._router_up = False
        self._was_in_step = False
        self.board: ReportBoard[RouterReport] = ReportBoard(
            keeper.unseen_report(self._desired, "the router was not looked at yet")
        )

    @property
    def ready(self) -> bool:
        """The router is up and has been in step since it came up: without workers it would answer 404."""
        return self._router_up and self._was_in_step

    def want(self, desired: RouterDesired) -> RouterReport:
        """Accepts `desired`, in its file before it returns. Raises errors.Superseded."""
        self._terms.accept(desired.lease_term, desired.serial)
        desired = replace(desired, serial=0)
        if desired != self._desired:
            write_private(self._file, dumps(desired))
            same = self._desired is not None and desired == replace(self._desired, lease_term=desired.lease_term)
            self._desired = desired
            known = self.board.report
            self.board.publish(
                replace(
                    known,
                    lease_term=desired.lease_term,
                    desired_id=desired.id,
                    in_step=known.in_step and same,
                    # A look that is under way may be giving a router that has just come back the earlier set.
                    router_up=known.router_up or not same,
                )
            )
            self._changed.set()
        return self.board.report

    async def run(self) -> None:
        """Until cancelled."""
        retry = FIRST_LOOK_SECONDS
        while True:
            self._changed.clear()
            if await self._look():
                pause, retry = LOOK_SECONDS, FIRST_LOOK_SECONDS
            else:
                pause, retry = retry, min(2 * retry, LOOK_SECONDS)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._changed.wait()
                retry = FIRST_LOOK_SECONDS

    async def _look(self) -> bool:
        desired = self._desired
        report = await self._keeper.step(desired)
        self._router_up = report.router_up
        if desired is not self._desired:
            return False  # it speaks of an older set; `want` has published that nothing is known of the new one
        self._was_in_step = report.in_step or (report.router_up and self._was_in_step)
        before = self.board.report
        if report.message and report.message != before.message:
            log.info("%s", report.message)
        self.board.publish(report)
        return report.in_step


def application(sidecar: Sidecar, settings: SidecarSettings) -> web.Application:
    async def live(request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def ready(request: web.Request) -> web.Response:
        if sidecar.ready:
            return web.Response(text="ok")
        return error_response(503, sidecar.board.report.message or "the router has not been in step yet")

    async def put_desired(request: web.Request) -> web.Response:
        return report_response(sidecar.want(loads(RouterDesired, await request.read())))

    async def close(app: web.Application) -> None:
        sidecar.board.close()

    fleet = FleetFile(settings.fleet_file)
    app = web.Application(
        middlewares=[
            json_errors,
            callers_only(fleet, {PATH_LIVE, PATH_READY}),
            this_pod_only(settings.pod_uid),
        ],
        client_max_size=MAX_BODY_BYTES,
    )
    app.router.add_get(PATH_LIVE, live)
    app.router.add_get(PATH_READY, ready)
    app.router.add_put(PATH_DESIRED, put_desired)
    app.router.add_get(PATH_REPORT, report_handler(sidecar.board))
    app.on_shutdown.append(close)
    return app


def control_key(folder: Path) -> str:
    """The key of the router's worker API. Made once a pod: the router goes on when only the sidecar starts again."""
    path = folder / CONTROL_KEY
    if not path.exists():
        write_private(path, secrets.token_urlsafe(32).encode())
    return path.read_text()
