"""Waiting that no cancellation cuts short: for whatever may still write where somebody else would write next."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any


async def outlast(work: asyncio.Future[Any]) -> None:
    """Returns when `work` is done, however often the caller is cancelled meanwhile. A second cancellation is common:
    a deadline that passes while the first one is being obeyed."""
    while not work.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([work])
