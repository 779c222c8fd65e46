"""What the Kubernetes API may answer instead of what was asked for."""

from __future__ import annotations

import json


class KubeError(Exception):
    """A call that failed. status: of HTTP, 0 when there was no answer. reason: Kubernetes' word (meta/v1 Status)."""

    def __init__(self, message: str, status: int = 0, reason: str = "", retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.retry_after = retry_after


class Unreachable(KubeError):
    """No answer: the connection failed or the deadline passed. A write may have happened."""


class NotFound(KubeError):
    """404."""


class Conflict(KubeError):
    """409: it was changed since it was read (or, on create, is there already)."""


class Gone(KubeError):
    """410: the resourceVersion or list token is too old: list again."""


class Refused(KubeError):
    """400, 403 or 422, or an apply with a field that the kind does not have: the same call can never succeed."""


_CLASSES: dict[int, type[KubeError]] = {
    400: Refused,
    403: Refused,
    404: NotFound,
    409: Conflict,
    410: Gone,
    422: Refused,
}


def error_of(call: str, status: int, body: bytes, retry_after: str | None = None) -> KubeError:
    """The error for an answer; body: a meta/v1 Status, or anything."""
    message, reason = body[:500].decode(errors="replace"), ""
    try:
        answer = json.loads(body)
        if isinstance(answer, dict):
            message, reason = str(answer.get("message") or message), str(answer.get("reason") or "")
    except ValueError:
        pass  # not from the API server itself: a proxy's page; its beginning is the message
    seconds = float(retry_after) if retry_after and retry_after.isdigit() else None
    # kube-apiserver answers 500 when a server-side apply names an unknown field, where other writes get 400.
    unknown_field = status == 500 and "failed to create typed patch object" in message
    return (Refused if unknown_field else _CLASSES.get(status, KubeError))(
        f"{call}: {status} {reason}: {message}", status, reason, seconds
    )
