"""What can go wrong for a trainer or a client of a fleet; each says what serves now and what to do."""

from __future__ import annotations

from collections.abc import Mapping


class FleetError(Exception):
    """Any of them."""


class FleetUnreachable(FleetError):
    """The API server or the router does not answer, or not to us."""


class PublishRefused(FleetError):
    """Bad input: nothing was changed in the cluster."""


class FleetMissing(PublishRefused, FleetUnreachable):
    """There is no fleet of this name in this namespace."""


class PublishFailed(FleetError):
    """The fleet did not take the version. `serving` is what it serves now; `engines` says why, by engine or agent.
    `lasting`: the weights themselves are wrong, the same again cannot help. `left`: what of it could not be taken back;
    empty, as it should be: spec.weights is as it was, and the label is free."""

    def __init__(
        self, sentence: str, *, serving: str = "", engines: Mapping[str, str] | None = None, lasting: bool = False
    ) -> None:
        super().__init__(sentence)
        self.serving = serving
        self.engines = dict(engines or {})
        self.lasting = lasting
        self.left = ""

    def __str__(self) -> str:
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in self.engines.items() if reason)
        serves = f"; {self.serving} serves on" if self.serving else ""
        left = f"; {self.left}" if self.left else ""
        return f"{self.args[0]}{serves}{left}{reasons}"


class PublishTimedOut(PublishFailed):
    """It was asked for and is not done within the timeout; it may still come."""


class GenerateFailed(FleetError):
    """The router or an engine refused the request, with its own words."""

    def __init__(self, sentence: str, status: int) -> None:
        super().__init__(sentence)
        self.status = status


class GenerateLost(FleetError):
    """The connection was lost. `sent`: the request may have been generated; it is never sent again by itself."""

    def __init__(self, sentence: str, *, sent: bool) -> None:
        super().__init__(sentence)
        self.sent = sent
