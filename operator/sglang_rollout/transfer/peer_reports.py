"""The hook's reports of the ranks in another pod of the same engine, for the agent of rank 0."""

from __future__ import annotations

import aiohttp

from sglang_rollout.protocol.pod import PATH_STAGE

from .hook_report import HookReport, report_from


class ReportsUnread(Exception):
    """The other agent did not say what its ranks did; the sentence says why."""


async def peer_reports(
    session: aiohttp.ClientSession, peer: str, key: str, transaction: str, action: str, seconds: float
) -> list[HookReport]:
    """Of one call of the hook, as hook_report.read_reports there. `peer` is host:port of the agent, `key` is
    AgentDesired.peer_key. Raises ReportsUnread."""
    url = f"http://{peer}{PATH_STAGE}/reports/{transaction}/{action}"
    limits = aiohttp.ClientTimeout(total=seconds)
    try:
        async with session.get(url, headers={"Authorization": f"Bearer {key}"}, timeout=limits) as answer:
            if answer.status != 200:
                raise ReportsUnread(f"{peer} answered {answer.status}: {' '.join((await answer.text()).split())[:300]}")
            return [report_from(value) for value in await answer.json()]
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError) as error:
        raise ReportsUnread(f"{peer}: {error or type(error).__name__}") from error
