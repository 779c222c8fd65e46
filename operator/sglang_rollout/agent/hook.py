"""Calls of the weight loader in every rank of the engine, and what the ranks say of them: each in a file of its pod,
since SGLang's answer is of rank 0 alone and a success whatever the loader found."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from sglang_rollout.transfer.hook_call import Action, HookCall, request_body
from sglang_rollout.transfer.hook_report import HookReport, read_reports
from sglang_rollout.transfer.peer_reports import ReportsUnread, peer_reports

from .engine_http import EngineError
from .sglang import SGLang

REPORT_SECONDS = 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ranks:
    """The ranks of one engine: how many, and where the agents of its other pods are, with the key to read there."""

    count: int
    fellows: tuple[str, ...] = ()
    key: str = ""


@dataclass(frozen=True)
class Verdict:
    """Of one call. problem: of the first rank that has one; heard: every rank said something. written: bytes of some
    rank's model may have changed. layouts: that every rank is known to take."""

    problem: str
    heard: bool
    written: bool
    layouts: frozenset[str]


class Hook:
    def __init__(self, session: aiohttp.ClientSession, folder: Path) -> None:
        self._session = session
        self._folder = folder

    async def call(
        self,
        engine: SGLang,
        action: Action,
        ranks: Ranks,
        seconds: float,
        *,
        version: str = "",
        root: str = "",
        sums: bool = True,
    ) -> Verdict:
        """Within a session that is open. Raises EngineError when the call itself fails."""
        # Of its own for each call: a report of an earlier one must not be taken for one of this.
        call = HookCall(action, secrets.token_hex(8), version, root, sums=sums)
        await engine.update_weights_from_tensor(request_body(call, ranks.count), seconds)
        # Here and not in a thread: a few lines in shared memory, and an engine stands still meanwhile.
        own = read_reports(self._folder, call.transaction, str(action))
        for report in own:
            log.info("%s in rank %d, seconds: %s", action, report.rank, report.seconds)
        try:
            others = await asyncio.gather(
                *(
                    peer_reports(self._session, fellow, ranks.key, call.transaction, str(action), REPORT_SECONDS)
                    for fellow in ranks.fellows
                )
            )
        except ReportsUnread as error:
            raise EngineError(str(error)) from error
        return judge([*own, *(report for reports in others for report in reports)], ranks.count)


def judge(reports: Sequence[HookReport], ranks: int) -> Verdict:
    missing = sorted(set(range(ranks)) - {report.rank for report in reports})
    bad = [report for report in reports if not report.good]
    if bad:
        problem = f"rank {bad[0].rank} ({bad[0].model}): {bad[0].problem}"
    elif missing:
        problem = f"rank {missing[0]} has not said what became of it"
    else:
        problem = ""
    layouts = [frozenset(report.layouts) for report in reports]
    return Verdict(
        problem,
        heard=not missing,
        # What a silent rank has done is not known.
        written=bool(missing) or any(report.written for report in reports),
        layouts=frozenset.intersection(*layouts) if layouts and not missing else frozenset(),
    )
