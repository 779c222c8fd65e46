"""One-shot operations: each is done once for each new requestID."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from .schema import ApiModel, RequestID, Rule

_REQUEST_MESSAGE = "a requestID names one request: give {} a new requestID when you change it"
_SAME_REQUEST = "self.requestID != oldSelf.requestID || self == oldSelf"


class WeightCheck(ApiModel):
    """Ask every engine to check its weights (SGLang's weights_checker)."""

    request_id: RequestID = Field(description="A new value asks again.")
    action: Literal["Snapshot", "Reset", "Compare", "Checksum"] = Field(
        description="Snapshot: remember the weights. Reset: overwrite them. Compare: with the snapshot."
        " Checksum: report sums."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule("weight-check-request", _SAME_REQUEST, _REQUEST_MESSAGE.format("weightCheck")),
    )


class Profile(ApiModel):
    """Ask every engine to profile itself."""

    request_id: RequestID = Field(description="A new value asks again.")
    steps: int = Field(default=5, ge=1, le=10000, description="Forward steps to record.")

    rules: ClassVar[tuple[Rule, ...]] = (Rule("profile-request", _SAME_REQUEST, _REQUEST_MESSAGE.format("profile")),)


class FlushCache(ApiModel):
    """Ask every engine to forget its KV cache. An engine that is busy is tried again for a minute."""

    request_id: RequestID = Field(description="A new value asks again.")


class AbortRequests(ApiModel):
    """Ask every engine to end all requests that it has; those that wait at the door of a paused engine stay."""

    request_id: RequestID = Field(description="A new value asks again.")


class Restart(ApiModel):
    """Restart all engines, maxUnavailable at a time."""

    request_id: RequestID = Field(description="A new value asks again.")
