"""Reads what the engine of this pod is: the launcher's record and socket, and SGLang's own answers."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import replace

import aiohttp

from sglang_rollout.protocol import pod
from sglang_rollout.protocol.launch import EngineRecord, KillOrder
from sglang_rollout.protocol.report import EngineState
from sglang_rollout.protocol.weights import WeightVersion
from sglang_rollout.protocol.wire import MalformedMessage, loads, to_wire

from .engine_http import EngineError
from .settings import AgentSettings
from .sglang import ServerInfo, SGLang
from .sglang_versions import UnsupportedRelease, release_of
from .situation import EngineFacts

log = logging.getLogger(__name__)

LAUNCHER_SECONDS = 5.0


class EngineWatch:
    """The present engine start: its record, its driver, and what was last read from it."""

    def __init__(self, settings: AgentSettings, session: aiohttp.ClientSession, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._session = session
        self._clock = clock
        self._record: EngineRecord | None = None
        self._record_mark: tuple[int, int] | None = None
        self._engine: SGLang | None = None
        self._facts = EngineFacts()
        self._answered_at = clock()
        self._server: tuple[str, ServerInfo] | None = None  # start id, what it says of itself
        self._refusal = ""
        self._looking = asyncio.Lock()  # the agent's loop looks, and whoever lets a trainer in
        self._said: dict[str, object] = {}  # by the engine's answers since the look that is under way began

    @property
    def record(self) -> EngineRecord | None:
        return self._record

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    @property
    def engine(self) -> SGLang:
        """The driver of the start that the last observation saw."""
        assert self._engine is not None
        return self._engine

    @property
    def url(self) -> str:
        host = "[::1]" if ":" in self._settings.pod_ip else "127.0.0.1"
        return f"http://{host}:{self._settings.engine_port}"

    @property
    def silent_seconds(self) -> float:
        """How long an engine that served has not answered; 0 when it answers or never did."""
        return self._clock() - self._answered_at if self._facts.state is EngineState.SERVING else 0.0

    @property
    def sglang_version(self) -> str:
        return self._server[1].version if self._server and self._server[0] == self._facts.start_id else ""

    @property
    def ranks(self) -> int:
        """Of tensor parallelism, over all pods of the engine."""
        return self._server[1].ranks if self._server and self._server[0] == self._facts.start_id else 1

    @property
    def refusal(self) -> str:
        """Why an engine that answers is not driven, so does not count as serving; empty when it is."""
        return self._refusal if self.sglang_version else ""

    async def observe(self) -> EngineFacts:
        """One look at a time: of two, the one that began first may end last, and put back what was so before."""
        async with self._looking:
            self._said = {}
            return await self._observe()

    async def _observe(self) -> EngineFacts:
        self._read_record()
        record = self._record
        if record is None or record.exited or not await self._launcher_lives(record.start_id):
            self._facts = EngineFacts(record.start_id if record else "")
            return self._facts
        if self._facts.start_id != record.start_id or self._facts.state is EngineState.ABSENT:
            self._facts = EngineFacts(record.start_id, EngineState.STARTING, launch=record.order.launch)
        try:
            self._facts = replace(await self._ask(self._facts), **self._said)  # type: ignore[arg-type]
            if self._facts.state is EngineState.SERVING:
                self._answered_at = self._clock()
        except EngineError as error:
            # A server that is busy for a moment still serves; one that stays silent is killed, by silent_seconds.
            if self._facts.state is EngineState.SERVING:
                log.warning("%s", error)
        return self._facts

    def assume(self, **read: object) -> None:
        """Puts in what an answer of the engine has just said, ahead of the next observation."""
        self._facts = replace(self._facts, **read)  # type: ignore[arg-type]
        self._said |= read

    async def kill(self, start_id: str, reason: str, ordered: bool) -> None:
        """Through the launcher. Raises EngineError when it does not answer."""
        order = to_wire(KillOrder(start_id, reason, ordered))
        try:
            status, text = await self._launcher("POST", pod.PATH_KILL, order)
        except TimeoutError as error:
            raise EngineError(f"the launcher did not answer a kill within {LAUNCHER_SECONDS:g} s") from error
        if status not in (200, 409):  # 409: that start is over
            raise EngineError(f"the launcher answered {status} to a kill: {text}")

    async def _ask(self, facts: EngineFacts) -> EngineFacts:
        engine = self.engine
        if not await engine.healthy():
            return facts
        if self._settings.rank > 0:
            return replace(facts, state=EngineState.SERVING, ready=True)
        if self._server is None or self._server[0] != facts.start_id:
            facts = await self._know(facts)
        if self._refusal:
            return facts
        info, ready = await asyncio.gather(engine.model_info(), engine.ready())
        return replace(facts, state=EngineState.SERVING, weights=WeightVersion(info.version, info.path), ready=ready)

    async def _know(self, facts: EngineFacts) -> EngineFacts:
        """Once for each start: which SGLang this is, and so how it is driven."""
        server = await self.engine.server_info()
        self._server, self._refusal = (facts.start_id, server), ""
        try:
            release = release_of(server.version)
        except UnsupportedRelease as refusal:
            log.error("%s", refusal)
            self._refusal = str(refusal)
            return facts
        self.engine.release = release
        log.info("SGLang %s, driven as %s", server.version, release)
        return replace(facts, release=release, watchdog_seconds=server.watchdog_seconds)

    def _read_record(self) -> None:
        path = self._settings.run_dir / pod.ENGINE_RECORD
        try:
            found = path.stat()
            mark = (found.st_ino, found.st_mtime_ns)
            if mark == self._record_mark:
                return
            record = loads(EngineRecord, path.read_bytes())
        except FileNotFoundError:
            return
        except MalformedMessage as error:
            log.error("%s: %s", path, error)
            return
        self._record_mark = mark
        self._record = record
        self._engine = SGLang(self._session, self.url, record.data_key, record.admin_key)

    async def _launcher_lives(self, start_id: str) -> bool:
        """A launcher that was killed itself leaves a record that says nothing of its end."""
        try:
            status, text = await self._launcher("GET", pod.PATH_START, None)
        except TimeoutError:
            return True  # somebody holds the socket: short of CPU time, not gone
        except EngineError:
            return False
        return status == 200 and start_id in text

    async def _launcher(self, method: str, path: str, message: object) -> tuple[int, str]:
        socket = os.fspath(self._settings.run_dir / pod.LAUNCHER_SOCKET)
        deadline = aiohttp.ClientTimeout(total=LAUNCHER_SECONDS)
        try:
            async with (
                aiohttp.ClientSession(connector=aiohttp.UnixConnector(path=socket), timeout=deadline) as session,
                session.request(method, f"http://launcher{path}", json=message) as response,
            ):
                return response.status, await response.text()
        except TimeoutError:
            raise
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(f"the launcher does not answer on {socket}: {error!r}") from error
