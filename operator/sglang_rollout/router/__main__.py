"""`python -m sglang_rollout.router`: the router's sidecar."""

from __future__ import annotations

import asyncio
import logging
import os
import signal

import aiohttp
from aiohttp import web

from sglang_rollout.serving.fleet_file import FleetFile

from .engine_probe import EngineProbe
from .keeper import MembershipKeeper
from .settings import SidecarSettings
from .sidecar import Sidecar, application, control_key
from .workers_api import WorkersApi

log = logging.getLogger("sglang_rollout.router")

SHUTDOWN_SECONDS = 2.0


async def serve(settings: SidecarSettings) -> None:
    """Serves until cancelled."""
    fleet = FleetFile(settings.fleet_file).read()
    fleet_name = f"{fleet.namespace}/{fleet.name}"
    key = control_key(settings.run_dir)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=15)) as session:
        keeper = MembershipKeeper(
            WorkersApi(session, settings.gateway_url, lambda: key, fleet_name),
            fleet_name,
            exclusive=True,
            pod_uid=settings.pod_uid,
            objection=EngineProbe(session).objection,
        )
        sidecar = Sidecar(settings, keeper)
        runner = web.AppRunner(
            application(sidecar, settings), access_log=None, handle_signals=False, shutdown_timeout=SHUTDOWN_SECONDS
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, settings.host, settings.port).start()
            log.info("serving on port %d for fleet %s", settings.port, fleet_name)
            await sidecar.run()
        finally:
            await runner.cleanup()


async def _main() -> None:
    task = asyncio.ensure_future(serve(SidecarSettings.from_environment(os.environ)))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        log.info("stopped")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    asyncio.run(_main())
