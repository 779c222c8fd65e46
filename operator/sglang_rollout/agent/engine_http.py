"""One HTTP call to the engine on this pod, with a deadline, and what can come of it."""

from __future__ import annotations

import json
import time
from typing import Any

import aiohttp


class EngineError(Exception):
    """A call to the engine failed; the sentence says which and how."""


class EngineUnreachable(EngineError):
    """No answer: refused, cut off, or not within the deadline. What was asked may have happened all the same."""


class EngineUnheard(EngineUnreachable):
    """Nobody listens: what was asked was not heard, so it has not happened."""


class EngineHttp:
    """spent: seconds by route, for whoever wants to know what a pause went into."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        self.spent: dict[str, float] = {}

    async def ok(self, method: str, path: str, body: Any, headers: dict[str, str], seconds: float) -> Any:
        """The decoded answer of status 200, None where it is empty. Raises EngineError."""
        status, text = await self.call(method, path, body, headers, seconds)
        if status != 200:
            raise EngineError(f"{path} answered {status}: {one_line(text)}")
        try:
            return json.loads(text) if text.strip() else None
        except ValueError as error:
            raise EngineError(f"{path} answered no JSON: {one_line(text)}") from error

    async def call(self, method: str, path: str, body: Any, headers: dict[str, str], seconds: float) -> tuple[int, str]:
        """Status and text, whatever they are. Raises EngineUnreachable."""
        deadline = aiohttp.ClientTimeout(total=seconds)
        begun = time.monotonic()
        try:
            async with self._session.request(
                method, self._url + path, json=body, headers=headers, timeout=deadline
            ) as response:
                return response.status, await response.text()
        except TimeoutError as error:
            raise EngineUnreachable(f"{path} did not answer within {seconds:g} s") from error
        except aiohttp.ClientConnectorError as error:
            raise EngineUnheard(f"{path}: {error}") from error
        except aiohttp.ClientError as error:
            raise EngineUnreachable(f"{path}: {type(error).__name__}: {error}") from error
        finally:
            self.spent[path] = self.spent.get(path, 0.0) + time.monotonic() - begun


def one_line(text: str) -> str:
    """The beginning of an answer, for a sentence."""
    return " ".join(text.split())[:400]
