"""Calls that name the pod they mean: addresses of pods are reused, and an order for the last one is not for us."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from sglang_rollout.protocol.pod import QUERY_POD

from .errors import Refusal

if TYPE_CHECKING:  # names that the aiohttp of an engine's image may not have yet
    from aiohttp.typedefs import Handler, Middleware


class OtherPod(Refusal):
    """A call that was meant for another pod."""

    status = 421


def this_pod_only(pod_uid: str) -> Middleware:
    """A middleware that refuses calls whose QUERY_POD names another pod; without it anyone may be meant."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        meant = request.query.get(QUERY_POD, pod_uid)
        if meant != pod_uid:
            raise OtherPod(f"this is pod {pod_uid}, not {meant}: the address has been given to another pod")
        return await handler(request)

    return check
