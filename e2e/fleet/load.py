"""Requests all the time, and what must be true of their answers whatever the test does meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from e2e.deployment import answers
from e2e.deployment.router_client import Request, RouterClient
from e2e.deployment.traffic import Traffic, traffic
from e2e.fleet.journal import Journal

Load = Callable[[], AbstractAsyncContextManager[Traffic]]


def steady_load(
    router: RouterClient, journal: Journal, logprobs: Mapping[str, tuple[float, ...]], requests: Sequence[Request]
) -> Load:
    """At its end: no answer came from weights of another version than its label says, or of a version that was never
    asked for. Whether requests may fail is the test's own matter. logprobs: by model name."""

    @asynccontextmanager
    async def running() -> AsyncIterator[Traffic]:
        async with traffic(router, requests) as seen:
            await seen.more(len(requests))
            yield seen
        assert not answers.other_than(seen.answers, journal.order)
        fingerprints = {label: logprobs[model] for label, model in journal.models.items()}
        assert not answers.mislabelled(seen.answers, fingerprints)

    return running
