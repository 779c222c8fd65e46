"""The agent as a process: its parts put together, served, and taken down again."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

from sglang_rollout.protocol import pod
from sglang_rollout.serving.fleet_file import FleetFile
from sglang_rollout.serving.terms import LeaseTerms

from .actor import Actor
from .control import Control
from .engine_door import EngineDoor
from .engine_watch import EngineWatch
from .fault_points import FaultPoints
from .group import StartGate
from .hook import Hook
from .journal import JournalFile
from .live_transfer import LiveTransfer
from .move_steps import MoveSteps
from .reference import ReferenceFile
from .server import launcher_app, operator_app
from .settings import AgentSettings
from .stage_door import StageDoor
from .stage_room import StageRoom
from .staging import Staging

TERMS_FILE = "lease-term"
JOURNAL_FILE = "journal.json"
REFERENCE_FILE = "boot-manifest.json"
SHUTDOWN_SECONDS = 2.0
# Below the five seconds after which SGLang closes a connection by default: a call on one that is being closed is lost.
KEPT_SECONDS = 2.0


@asynccontextmanager
async def running_agent(settings: AgentSettings, host: str) -> AsyncIterator[asyncio.Task[None]]:
    """An agent that serves on `host`; its loop is the task, which ends only by a failure."""
    for folder in (settings.run_dir, settings.state_dir):
        folder.mkdir(parents=True, exist_ok=True)
    fleet = FleetFile(settings.fleet_file)
    terms = LeaseTerms(settings.state_dir / TERMS_FILE)
    reference = ReferenceFile(settings.state_dir / REFERENCE_FILE)
    connector = aiohttp.TCPConnector(keepalive_timeout=KEPT_SECONDS)
    async with aiohttp.ClientSession(connector=connector) as session:
        watch = EngineWatch(settings, session, time.monotonic)
        await watch.observe()  # so that the first report of an agent that starts again does not call its engine absent
        journal = JournalFile(settings.state_dir / JOURNAL_FILE)
        faults = FaultPoints.read(os.environ)
        room = StageRoom(settings.stage)
        staging = Staging(settings, room, session, faults)
        live = LiveTransfer(settings.pod_name or settings.pod_uid)
        hook = Hook(session, settings.stage.folder)
        moves = MoveSteps(watch, journal, reference, settings, staging, hook, live, faults)
        actor = Actor(watch, journal, moves, time.monotonic, settings, faults)
        gate = StartGate(settings, fleet, reference, room, session, lambda: actor.journal.desired)
        control = Control(settings, watch, actor, gate, time.monotonic, terms.highest)
        door = EngineDoor(session, watch, journal, control)
        stage_door = StageDoor(lambda: room.stage, lambda: control.desired.peer_key if control.desired else "")
        operator = web.AppRunner(
            operator_app(control, fleet, terms, door, stage_door), access_log=None, shutdown_timeout=SHUTDOWN_SECONDS
        )
        launcher = web.AppRunner(launcher_app(control), access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)
        socket = settings.run_dir / pod.AGENT_SOCKET
        loop: asyncio.Task[None] | None = None
        try:
            await operator.setup()
            await launcher.setup()
            await web.TCPSite(operator, host, settings.agent_port).start()
            socket.unlink(missing_ok=True)
            await web.UnixSite(launcher, os.fspath(socket)).start()
            loop = asyncio.create_task(control.run())
            yield loop
        finally:
            control.close()
            if loop is not None:
                loop.cancel()
                await asyncio.wait([loop])  # its failure is the caller's: what follows must be done all the same
            await launcher.cleanup()
            await operator.cleanup()
            await actor.close()
            await live.close()
            await staging.close()
