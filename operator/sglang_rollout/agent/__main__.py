"""python3 -m sglang_rollout.agent: serves until SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys

from .process import running_agent
from .settings import AgentSettings


async def serve(settings: AgentSettings) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with running_agent(settings, settings.pod_ip) as loop:
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({loop, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if loop.done():
            await loop  # it never ends but by a failure, which ends the process: the kubelet starts another


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stdout)
    try:
        settings = AgentSettings.read(os.environ)
    except (KeyError, ValueError) as error:
        logging.getLogger(__name__).error("the pod's environment is not complete: %r", error)
        return 2
    asyncio.run(_serve_or_end(settings))
    return 0


async def _serve_or_end(settings: AgentSettings) -> None:
    try:
        await serve(settings)
    except ExceptionGroup as failure:
        log = logging.getLogger(__name__)
        log.exception("the agent cannot go on")
        log.error("the agent cannot go on: %s", "; ".join(causes(failure)))  # last: it is what the status shows
        logging.shutdown()
        os._exit(1)  # a thread may wait for a trainer, and the end of the event loop would wait for the thread


def causes(failure: Exception) -> list[str]:
    """What went wrong in the tasks of a group, each in a few words."""
    if isinstance(failure, ExceptionGroup):
        return [cause for inner in failure.exceptions for cause in causes(inner)]
    return [f"{type(failure).__name__}: {failure}"]


if __name__ == "__main__":
    sys.exit(main())
