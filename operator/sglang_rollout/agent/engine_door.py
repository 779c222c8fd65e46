"""The engine's own routes for a trainer that drives it by itself (control: External). The admin key stays in the pod:
the trainer shows its ServiceAccount token, and the agent calls for it and keeps what SGLang forgets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterable, Sequence
from dataclasses import replace
from typing import Protocol

import aiohttp
from aiohttp import web

from sglang_rollout.protocol.memory import MemoryTag
from sglang_rollout.protocol.report import EngineState
from sglang_rollout.protocol.weights import WeightVersion
from sglang_rollout.serving.errors import Refusal

from .engine_http import EngineError
from .engine_watch import EngineWatch
from .journal import JournalFile, Residency
from .sglang import ModelInfo
from .sglang_versions import Release
from .situation import EngineFacts

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 1800.0  # an update lasts as long as the trainer sends
LABEL_TRIES = 3
RELEASE, RESUME = "release_memory_occupation", "resume_memory_occupation"
UPDATES = "update_weights_from_"
# Here SGLang wants the data key even of one who has the admin key (srt/utils/auth.py, level normal).
WITH_DATA_KEY = (
    "generate", "v1/", "health", "ready", "metrics", "ping", "model_info", "get_model_info", "tokenize", "detokenize",
    "classify", "encode", "open_session", "close_session", "parse_function_call", "separate_reasoning", "openapi.json",
)  # fmt: skip
# What puts weights into an engine, or looks at it: all that a trainer may do under weights.source.type External.
OF_WEIGHTS = (
    UPDATES, "update_weight_version", "init_weights_update_group", "destroy_weights_update_group",
    "begin_weight_update", "end_weight_update", "weights_checker", "get_weights_by_name", "model_info", "server_info",
    "get_model_info", "health", "ready", "v1/loads", "metrics", "flush_cache",
)  # fmt: skip
_FORWARDED = ("Content-Type", "Accept")


class EngineAway(Refusal):
    """There is no engine to talk to now."""

    status = 503


class NoAnswer(Refusal):
    """The engine did not answer, or not to the end: what was asked may have happened all the same."""

    status = 502


class NotExternal(Refusal):
    """The operator drives this engine, or does this part of it."""

    status = 409


class Driven(Protocol):
    """The agent's control, as far as a trainer meets it."""

    @property
    def hands_off(self) -> bool: ...

    @property
    def open_door(self) -> bool: ...

    @property
    def facts(self) -> EngineFacts: ...

    def look(self) -> None: ...


class EngineDoor:
    def __init__(
        self, session: aiohttp.ClientSession, watch: EngineWatch, journal: JournalFile, control: Driven
    ) -> None:
        self._session = session
        self._watch = watch
        self._journal = journal
        self._control = control

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        """One request to the engine and its answer back. Raises Refusal."""
        route = request.match_info["route"]
        if not self._control.hands_off and not (self._control.open_door and route.startswith(OF_WEIGHTS)):
            raise NotExternal(_who_drives(route, self._control.open_door))
        facts = self._control.facts
        if facts.state is not EngineState.SERVING:
            raise EngineAway(f"the engine is {facts.state.value}: try again")
        body: AsyncIterable[bytes] | bytes | None = request.content if request.can_read_body else None
        tags: Sequence[MemoryTag] = ()
        if route in (RELEASE, RESUME):
            body = read = await request.read()
            tags = _tags(read, facts.release)
        if route == RELEASE:
            self._released(facts, tags)
        try:
            return await self._answer(request, route, body, tags)
        finally:
            self._control.look()

    async def _answer(
        self, request: web.Request, route: str, body: AsyncIterable[bytes] | bytes | None, tags: Sequence[MemoryTag]
    ) -> web.StreamResponse:
        record = self._watch.record
        assert record is not None
        key = record.data_key if route.startswith(WITH_DATA_KEY) else record.admin_key
        headers = {name: request.headers[name] for name in _FORWARDED if name in request.headers}
        headers["Authorization"] = f"Bearer {key}"
        deadline = aiohttp.ClientTimeout(total=ANSWER_SECONDS, sock_connect=CONNECT_SECONDS)
        passed = web.StreamResponse()
        updated = False
        try:
            async with self._session.request(
                request.method,
                f"{self._watch.url}/{route}",
                params=request.query,
                data=body,
                headers=headers,
                timeout=deadline,
                allow_redirects=False,
            ) as answer:
                if updated := answer.status == 200:
                    await self._done(route, tags)
                passed.set_status(answer.status)
                passed.content_type = answer.content_type
                await passed.prepare(request)
                async for chunk in answer.content.iter_any():
                    await passed.write(chunk)
        except (aiohttp.ClientError, TimeoutError, asyncio.IncompleteReadError) as error:
            if passed.prepared:
                raise  # the connection is cut: an answer that only looks whole would be worse
            raise NoAnswer(f"/{route}: {error or type(error).__name__}") from error
        finally:
            if route.startswith(UPDATES) and not updated:
                self._half_updated(route)
        await passed.write_eof()
        return passed

    # --- what SGLang forgets ---

    def _released(self, facts: EngineFacts, tags: Sequence[MemoryTag]) -> None:
        """Before the call: from now on nobody generates here, and no router may have it."""
        held = self._residency(facts.start_id)
        if MemoryTag.WEIGHTS in tags and not facts.launch.weights_backup:
            held = replace(held, releases=held.releases + 1, void=f"released:{held.releases + 1}")
        self._keep(replace(held, released=sorted({*held.released, *tags})))

    def _half_updated(self, route: str) -> None:
        """Any part of the new weights may be in under the old label: nothing is served by them until another update has
        ended well."""
        held = self._residency(self._control.facts.start_id)
        self._journal.remember(held=None)
        self._keep(replace(held, void=held.void or f"trainer:{route}"))

    async def _done(self, route: str, tags: Sequence[MemoryTag]) -> None:
        held = self._residency(self._control.facts.start_id)
        if route == RESUME:
            self._keep(replace(held, released=[tag for tag in held.released if tag not in tags]))
        if route.startswith(UPDATES) and held.void:
            info = await self._label()
            self._watch.assume(weights=WeightVersion(info.version, info.path))
            self._keep(replace(held, void=""))

    async def _label(self) -> ModelInfo:
        """It must be known before it counts: the one that was read last is of the weights of before."""
        for _ in range(LABEL_TRIES):
            try:
                return await self._watch.engine.model_info()
            except EngineError as error:
                problem = error
        raise NoAnswer(f"the weights are in, and nothing is served before their label is known: again, for {problem}")

    def _residency(self, start_id: str) -> Residency:
        kept = self._journal.now.residency
        return kept if kept is not None and kept.start_id == start_id else Residency(start_id)

    def _keep(self, held: Residency) -> None:
        self._journal.remember(residency=held)
        self._journal.save()


def _who_drives(route: str, open_door: bool) -> str:
    if open_door:
        return (
            "under weights.source.type External you move the weights, and the operator does the rest: instead of"
            f" /{route} patch spec.execution or spec.memory, or set spec.control to External to drive it all yourself"
        )
    return (
        "the operator drives this engine: set spec.control to External to drive it yourself, or"
        " spec.weights.source.type to External to move its weights"
    )


def _tags(body: bytes, release: Release) -> list[MemoryTag]:
    """The tags that a release or resume names; SGLang takes none of them for all. Raises Refusal."""
    try:
        named = (json.loads(body or b"{}") or {}).get("tags") or list(release.memory_tags.values())
        by_name = {name: tag for tag, name in release.memory_tags.items()}
        return [by_name[name] for name in named]
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        known = ", ".join(release.memory_tags.values())
        raise Refusal(f'the body must be {{"tags": [...]}} with some of {known}: {error!r}') from error
