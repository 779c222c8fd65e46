"""Asking a fleet for tokens through its router. A request is sent once: one that may have been generated is never sent
again, since its tokens may be a rollout that counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from .errors import FleetUnreachable, GenerateFailed, GenerateLost

TIMEOUT = 600.0
CONNECT_SECONDS = 10.0


@dataclass(frozen=True)
class VersionSpan:
    """Output tokens [begin, end) were computed by `version`. Where weights move under InPlace, an edge may be off by
    the tokens that were in flight: `exact` is False then."""

    version: str
    begin: int
    end: int
    exact: bool = True


@dataclass(frozen=True)
class Generation:
    """text: as the engine gave it, empty when it gave only ids. finish: type of SGLang's finish_reason. meta:
    its meta_info."""

    text: str
    output_ids: tuple[int, ...]
    versions: tuple[VersionSpan, ...]
    finish: str
    meta: Mapping[str, Any] = field(repr=False)

    @property
    def version(self) -> str:
        """Of all tokens; "" when there are several."""
        labels = {span.version for span in self.versions}
        return labels.pop() if len(labels) == 1 else ""


class Router:
    """fleet: gives the resource; read when something of it is needed, and again after a failure."""

    def __init__(self, fleet: Callable[[], Mapping[str, Any]], url: str = "", api_key: str = "") -> None:
        self._fleet = fleet
        self._url = url
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client: httpx.Client | None = None

    def generate(self, **request: Any) -> Generation:
        url, body, timeout, exact = self._request(**request)
        if self._client is None:
            self._client = httpx.Client(headers=self._headers, limits=httpx.Limits(max_connections=None))
        try:
            return _answer(self._client.post(url, json=body, timeout=_timeout(timeout)), exact=exact)
        except httpx.TransportError as error:
            raise _lost(error, url) from error

    async def agenerate(self, **request: Any) -> Generation:
        import asyncio

        url, body, timeout, exact = await asyncio.to_thread(lambda: self._request(**request))
        # One for each call: a client belongs to one event loop, and calls may come from several.
        async with httpx.AsyncClient(headers=self._headers) as client:
            try:
                return _answer(await client.post(url, json=body, timeout=_timeout(timeout)), exact=exact)
            except httpx.TransportError as error:
                raise _lost(error, url) from error

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _request(
        self,
        *,
        prompt: str | None = None,
        input_ids: Sequence[int] | None = None,
        sampling: Mapping[str, Any] | None = None,
        timeout: float = TIMEOUT,
    ) -> tuple[str, dict[str, Any], float, bool]:
        if (prompt is None) == (input_ids is None):
            raise ValueError("give prompt or input_ids, and not both")
        fleet = self._fleet()
        body: dict[str, Any] = {"sampling_params": dict(sampling or {})}
        body |= {"text": prompt} if prompt is not None else {"input_ids": list(input_ids or ())}
        if key := _cache_key(fleet):
            body["extra_key"] = key
        url = self._url or str(((fleet.get("status") or {}).get("router") or {}).get("url") or "")
        if not url:
            raise FleetUnreachable(f"fleet {fleet['metadata']['name']} has no router yet: wait until it is Available")
        exact = ((fleet.get("spec") or {}).get("weights") or {}).get("pauseMode") != "InPlace"
        return f"{url.rstrip('/')}/generate", body, timeout, exact


@dataclass
class Conversation:
    """Tokens so far, those of the fleet included: the next turn begins with exactly what was generated, not with a text
    that a tokenizer might cut otherwise."""

    router: Router
    input_ids: list[int]
    turns: list[Generation] = field(default_factory=list)

    async def agenerate(self, more_ids: Sequence[int] = (), **request: Any) -> Generation:
        """Adds `more_ids`, then what comes back. After an error the conversation is as it was."""
        asked = [*self.input_ids, *more_ids]
        return self._took(asked, await self.router.agenerate(input_ids=asked, **request))

    def generate(self, more_ids: Sequence[int] = (), **request: Any) -> Generation:
        asked = [*self.input_ids, *more_ids]
        return self._took(asked, self.router.generate(input_ids=asked, **request))

    def _took(self, asked: list[int], answer: Generation) -> Generation:
        self.input_ids = [*asked, *answer.output_ids]
        self.turns.append(answer)
        return answer


def _cache_key(fleet: Mapping[str, Any]) -> str:
    """What keeps prefixes that other weights computed from being used: needed only where the cache is kept over a move
    (SGLang: extra_key of /generate)."""
    if ((fleet.get("spec") or {}).get("weights") or {}).get("kvCache") != "Keep":
        return ""
    status = (fleet.get("status") or {}).get("weights") or {}
    return f"{status.get('version', '')}/{(status.get('transaction') or {}).get('id', '')}"


def _answer(response: httpx.Response, *, exact: bool) -> Generation:
    if response.status_code != httpx.codes.OK:
        raise GenerateFailed(f"{response.status_code}: {response.text[:500]}", response.status_code)
    try:
        value = response.json()
        meta = value["meta_info"]
        output_ids = tuple(value.get("output_ids") or ())
        spans = _spans(meta, len(output_ids) or int(meta.get("completion_tokens") or 0), exact=exact)
        finish = str((meta.get("finish_reason") or {}).get("type") or "")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise GenerateFailed(f"an answer in another form than SGLang's: {error!r}", response.status_code) from error
    return Generation(str(value.get("text") or ""), output_ids, spans, finish, meta)


def _spans(meta: Mapping[str, Any], tokens: int, *, exact: bool) -> tuple[VersionSpan, ...]:
    """meta_info.weight_versions where the engine gives them, else its one label for all."""
    told = meta.get("weight_versions")
    if told:
        sure = exact or len(told) == 1
        return tuple(VersionSpan(str(one["version"]), int(one["start"]), int(one["end"]), sure) for one in told)
    return (VersionSpan(str(meta.get("weight_version") or ""), 0, tokens),)


def _timeout(seconds: float) -> httpx.Timeout:
    return httpx.Timeout(seconds, connect=min(CONNECT_SECONDS, seconds))


def _lost(error: httpx.TransportError, url: str) -> GenerateLost:
    unsent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.UnsupportedProtocol)
    what = "it was not sent" if unsent else "it may have been generated, so it is not sent again"
    return GenerateLost(f"{url}: {type(error).__name__}: {error}; {what}", sent=not unsent)
