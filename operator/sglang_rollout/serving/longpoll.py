"""Reports that callers wait for: each change of a report gives it a new revision and answers those who wait."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from aiohttp import web

from sglang_rollout.protocol.wire import dumps

from .errors import Refusal

MAX_WAIT_SECONDS = 60.0


class Revisioned(Protocol):
    """A frozen message dataclass with a revision (AgentReport, RouterReport)."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def revision(self) -> int: ...


R = TypeVar("R", bound=Revisioned)


class ReportBoard(Generic[R]):
    """The present report. Revisions begin at the wall clock's milliseconds, so that a caller who waits for a
    change after the revision of an earlier process can never meet the same number again by chance."""

    def __init__(self, report: R, first_revision: int | None = None) -> None:
        first = time.time_ns() // 1_000_000 if first_revision is None else first_revision
        self._report: R = replace(report, revision=first)
        self._changed = asyncio.Event()
        self._closed = False

    @property
    def report(self) -> R:
        return self._report

    def publish(self, report: R) -> R:
        """Makes `report` the present one, whatever its revision says; an equal one changes nothing."""
        revision = self._report.revision
        if replace(report, revision=revision) != self._report:
            self._report = replace(report, revision=revision + 1)
            self._wake()
        return self._report

    async def after(self, revision: int, seconds: float) -> R:
        """The report as soon as its revision is another than `revision`, at the latest after `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                while self._report.revision == revision and not self._closed:
                    await self._changed.wait()
        except TimeoutError:
            pass
        return self._report

    def close(self) -> None:
        """Answers everyone who waits and lets nobody wait any more: the process is about to end."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def report_response(report: Any) -> web.Response:
    return web.Response(body=dumps(report), content_type="application/json")


def report_handler(board: ReportBoard[Any]) -> Callable[[web.Request], Awaitable[web.Response]]:
    """GET ?after=<revision>&wait=<seconds>, at most MAX_WAIT_SECONDS; without `after` it answers at once."""

    async def get(request: web.Request) -> web.Response:
        try:
            after = int(request.query.get("after", "-1"))
            wait = float(request.query.get("wait", "0"))
        except ValueError as error:
            raise Refusal(f"after must be a revision and wait a number of seconds: {error}") from error
        if not math.isfinite(wait):
            raise Refusal(f"wait must be a number of seconds, not {wait}")
        return report_response(await board.after(after, min(max(wait, 0.0), MAX_WAIT_SECONDS)))

    return get
