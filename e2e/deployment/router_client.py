"""A client of a fleet's router: SGLang's /generate, as a trainer's rollout worker calls it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import httpx

from e2e.deployment.answers import Answer
from e2e.deployment.connection import Connection, service_url
from sglang_rollout.api.names import router_name
from sglang_rollout.protocol.pod import ROUTER_PORT

# Long enough for a request that waits out a pause and a weight move.
ANSWER_SECONDS = 240.0
PROMPT = "the router sends a request to an engine and"


@dataclass(frozen=True)
class Request:
    """A greedy generation of exactly `tokens` tokens. prompt: a text, or token ids. fingerprint: ask for the log
    probabilities of the prompt's tokens, which tell the weights that computed them."""

    prompt: str | tuple[int, ...] = PROMPT
    tokens: int = 16
    fingerprint: bool = False

    def body(self) -> dict[str, Any]:
        """As POST /generate takes it."""
        key = "text" if isinstance(self.prompt, str) else "input_ids"
        sampling = {"max_new_tokens": self.tokens, "temperature": 0, "ignore_eos": True}
        wanted = {"return_logprob": True, "logprob_start_len": 0} if self.fingerprint else {}
        return {key: self.prompt, "sampling_params": sampling, **wanted}


class RouterClient:
    """Requests to one router, or to all behind a Service, at the paths below `url`. Nothing is retried: every failure
    is seen."""

    def __init__(self, connection: Connection, url: str) -> None:
        self._client = connection.client
        self._url = url

    @classmethod
    def of_fleet(cls, connection: Connection, namespace: str, fleet: str) -> RouterClient:
        return cls(connection, service_url(namespace, router_name(fleet), ROUTER_PORT))

    async def generate(self, request: Request | None = None, *, timeout: float = ANSWER_SECONDS) -> Answer:
        """Send one request and wait for its answer; what goes wrong is in the answer."""
        asked = request or Request()
        sent = time.monotonic()
        try:
            response = await self._client.post(f"{self._url}/generate", json=asked.body(), timeout=timeout)
        except httpx.HTTPError as error:
            return Answer(sent, time.monotonic(), 0, f"{type(error).__name__}: {error}")
        return _answer(response, asked, sent, time.monotonic())


def _answer(response: httpx.Response, asked: Request, sent: float, received: float) -> Answer:
    if response.status_code != 200:
        return Answer(sent, received, response.status_code, response.text[:300])
    try:
        decoded = response.json()
        meta = decoded["meta_info"]
        finish = meta["finish_reason"]["type"]
        # The first token has no predecessor, so no log probability.
        logprobs = tuple(float(one[0]) for one in meta.get("input_token_logprobs") or () if one[0] is not None)
        return Answer(
            sent,
            received,
            200,
            error="" if finish == "length" else f"finished by {meta['finish_reason']}",
            version=str(meta["weight_version"]),
            spans=tuple(str(span["version"]) for span in meta.get("weight_versions") or ()),
            text=decoded["text"],
            cached_tokens=int(meta.get("cached_tokens") or 0),
            prompt_logprobs=logprobs if asked.fingerprint else None,
        )
    except (ValueError, KeyError, TypeError) as error:
        return Answer(sent, received, 200, f"not an answer of SGLang: {type(error).__name__}: {response.text[:200]}")
