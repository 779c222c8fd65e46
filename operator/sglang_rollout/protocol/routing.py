"""What the operator and a router's sidecar tell each other: which workers the router must have."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Worker:
    """An engine as a router knows it. `api_key` is the engine's data key of this start: a registration made with
    the key of an earlier start is refused by the engine, so it must be replaced even when the URL is equal."""

    url: str
    api_key: str
    engine: str
    incarnation: int
    weight_version: str


@dataclass(frozen=True)
class RouterDesired:
    """PUT /v1/desired at the sidecar. `id` names this set of workers (equal sets have equal ids). serial: grows with
    every call of one lease term; a call that arrives after a later one is refused."""

    lease_term: int
    id: str
    workers: list[Worker] = field(default_factory=list)
    serial: int = 0


@dataclass(frozen=True)
class RegisteredWorker:
    url: str
    engine: str
    incarnation: int
    healthy: bool


@dataclass(frozen=True)
class RouterReport:
    """GET /v1/report. in_step: the router was seen to have exactly the workers of `desired_id`, no more, no fewer,
    each with its present key; it turns false again when the router restarts or loses one. router_up: false only when
    nothing listens at its address: one that is slow, or refuses to say, may go on serving what it had.
    registered: as last seen; of a router that does not say, what it had or was to have."""

    revision: int
    sidecar_start: str
    pod_uid: str
    lease_term: int = 0
    desired_id: str = ""
    in_step: bool = False
    router_up: bool = False
    registered: list[RegisteredWorker] = field(default_factory=list)
    message: str = ""
