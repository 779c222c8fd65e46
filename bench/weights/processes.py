"""The processes that a bench talks to, a line each way."""

from __future__ import annotations

import asyncio

ANSWER_SECONDS = 180.0


async def line_of(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    async with asyncio.timeout(ANSWER_SECONDS):
        line = await process.stdout.readline()
    assert line, "a process of the bench ended"
    return line


async def end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()
