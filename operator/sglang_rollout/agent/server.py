"""The agent's two HTTP servers: for the operator and the other agents on TCP, for its launcher on a Unix socket."""

from __future__ import annotations

from dataclasses import replace

from aiohttp import web

from sglang_rollout.protocol import pod
from sglang_rollout.protocol.desired import AgentDesired
from sglang_rollout.protocol.launch import LaunchRequest
from sglang_rollout.protocol.wire import loads
from sglang_rollout.serving.addressed import this_pod_only
from sglang_rollout.serving.errors import error_response, json_errors
from sglang_rollout.serving.fleet_file import FleetFile
from sglang_rollout.serving.longpoll import report_handler, report_response
from sglang_rollout.serving.terms import LeaseTerms
from sglang_rollout.serving.trust import callers_only

from .control import Control
from .engine_door import EngineDoor
from .group import NotYet
from .stage_door import StageDoor

TOO_EARLY = 425


def operator_app(
    control: Control, fleet: FleetFile, terms: LeaseTerms, door: EngineDoor, stage_door: StageDoor
) -> web.Application:
    """Open: probes and identity. The stage is for other agents, everything else for callers that the fleet trusts."""

    async def live(request: web.Request) -> web.Response:
        return web.json_response({})

    async def ready(request: web.Request) -> web.Response:
        if control.serves:
            return web.json_response({})
        report = control.board.report
        return error_response(503, f"engine {report.engine.state}: {report.engine.failure or report.message}")

    async def identity(request: web.Request) -> web.Response:
        return report_response(control.identity())

    async def put_desired(request: web.Request) -> web.Response:
        desired = loads(AgentDesired, await request.read())
        try:
            terms.accept(desired.lease_term, desired.serial)
            return report_response(control.accept(replace(desired, serial=0)))
        except OSError as error:
            control.give_up(error)
            raise

    open_paths = {pod.PATH_LIVE, pod.PATH_READY, pod.PATH_IDENTITY}
    app = web.Application(
        middlewares=[
            json_errors,
            callers_only(fleet, open_paths, trainer_paths=f"{pod.PATH_ENGINE}/", guarded_paths=f"{pod.PATH_STAGE}/"),
            this_pod_only(control.board.report.pod_uid),
        ]
    )
    app.router.add_get(pod.PATH_LIVE, live)
    app.router.add_get(pod.PATH_READY, ready)
    app.router.add_get(pod.PATH_IDENTITY, identity)
    app.router.add_put(pod.PATH_DESIRED, put_desired)
    app.router.add_get(pod.PATH_REPORT, report_handler(control.board))
    app.router.add_route("*", f"{pod.PATH_ENGINE}/{{route:.+}}", door.pass_on)
    stage_door.serve(app)
    return app


def launcher_app(control: Control) -> web.Application:
    """For whoever may open the socket: the containers of this pod."""

    async def launch(request: web.Request) -> web.Response:
        message = loads(LaunchRequest, await request.read())
        try:
            return report_response(await control.launches.hold(message.start_id))
        except NotYet as reason:
            return error_response(TOO_EARLY, str(reason))

    async def drain(request: web.Request) -> web.Response:
        await control.drain()
        return web.json_response({})

    app = web.Application(middlewares=[json_errors])
    app.router.add_post(pod.PATH_LAUNCH, launch)
    app.router.add_post(pod.PATH_DRAIN, drain)
    return app
