"""Errors of our HTTP servers: a status and a JSON body {"error": "<sentence>"}, for every kind of failure."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from aiohttp import web

from sglang_rollout.protocol.wire import MalformedMessage

if TYPE_CHECKING:  # names that the aiohttp of an engine's image may not have yet
    from aiohttp.typedefs import Handler

log = logging.getLogger(__name__)


class Refusal(Exception):
    """A request that is answered with `status` and the sentence that the exception carries."""

    status = 400


class Unauthenticated(Refusal):
    """No token, or one that is not valid here."""

    status = 401


class Forbidden(Refusal):
    """A valid token of somebody who is not obeyed."""

    status = 403


class Superseded(Refusal):
    """An order of an operator that no longer leads."""

    status = 409


def error_response(status: int, sentence: str) -> web.Response:
    headers = {"WWW-Authenticate": "Bearer"} if status == Unauthenticated.status else None
    return web.json_response({"error": sentence}, status=status, headers=headers)


@web.middleware
async def json_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The outermost middleware: turns whatever a handler raises into a JSON error."""
    try:
        return await handler(request)
    except Refusal as refusal:
        return error_response(refusal.status, str(refusal))
    except MalformedMessage as error:
        return error_response(400, str(error))
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return error_response(error.status, f"{request.method} {request.path}: {error.reason}")
    except Exception as error:
        log.exception("%s %s failed", request.method, request.path)
        return error_response(500, f"{request.method} {request.path} failed: {type(error).__name__}: {error}")
