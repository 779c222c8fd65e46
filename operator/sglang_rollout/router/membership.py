"""Which workers a router must gain, change and lose: pure, from what it lists and what it should have.

All that must be remembered about a registration is in its labels at the router, a digest of its key included, since
routers do not show keys. So nothing is lost when a sidecar or an operator starts again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sglang_rollout.protocol.routing import Worker

LABEL_FLEET = "rollout.sglang.io/fleet"  # <namespace>/<name>: whose worker it is
LABEL_ENGINE = "rollout.sglang.io/engine"
LABEL_INCARNATION = "rollout.sglang.io/incarnation"
LABEL_VERSION = "rollout.sglang.io/weight-version"  # when last registered: for people, nothing is decided by it
LABEL_KEY = "rollout.sglang.io/key-digest"  # tells keys apart; 64 bits of a 256-bit random key's hash betray nothing


@dataclass(frozen=True)
class ListedWorker:
    """A worker as a router lists it. leaving: on its way out, gets no new requests and cannot be added yet."""

    id: str
    url: str
    labels: Mapping[str, str]
    healthy: bool
    leaving: bool = False


@dataclass(frozen=True)
class Add:
    worker: Worker


@dataclass(frozen=True)
class Update:
    """In place, under running requests. key_changed: the registration is useless until this is done."""

    id: str
    worker: Worker
    key_changed: bool


@dataclass(frozen=True)
class Remove:
    id: str
    url: str


Action = Add | Update | Remove


@dataclass(frozen=True)
class Comparison:
    """actions: removals first, then updates, then additions. awaited: workers that can only be added once their
    earlier registration is gone. in_step: exactly the desired workers get requests, each with its present key."""

    actions: tuple[Action, ...]
    awaited: tuple[Worker, ...]
    in_step: bool


def key_digest(api_key: str) -> str:
    return hashlib.sha256(api_key.encode()).hexdigest()[:16]


def worker_labels(worker: Worker, fleet: str) -> dict[str, str]:
    return {
        LABEL_FLEET: fleet,
        LABEL_ENGINE: worker.engine,
        LABEL_INCARNATION: str(worker.incarnation),
        LABEL_VERSION: worker.weight_version,
        LABEL_KEY: key_digest(worker.api_key),
    }


def compare(desired: Sequence[Worker], listed: Iterable[ListedWorker], fleet: str, exclusive: bool) -> Comparison:
    """exclusive: the router is ours, so every other worker goes. Otherwise workers of others stay, except that a
    desired worker's URL is taken over: there is one engine behind it."""
    wanted = {worker.url: worker for worker in desired}
    found: dict[str, ListedWorker] = {}
    leaving: set[str] = set()
    removals: list[Action] = []
    for entry in sorted(listed, key=lambda entry: entry.id):
        if entry.leaving:
            leaving.add(entry.url)
        elif entry.url in wanted and entry.url not in found:
            found[entry.url] = entry
        elif entry.url in wanted or exclusive or entry.labels.get(LABEL_FLEET) == fleet:
            removals.append(Remove(entry.id, entry.url))
    updates = [
        Update(entry.id, wanted[url], entry.labels.get(LABEL_KEY) != key_digest(wanted[url].api_key))
        for url, entry in found.items()
        if not worker_labels(wanted[url], fleet).items() <= entry.labels.items()
    ]
    missing = [worker for url, worker in wanted.items() if url not in found]
    return Comparison(
        actions=(*removals, *updates, *(Add(worker) for worker in missing if worker.url not in leaving)),
        awaited=tuple(worker for worker in missing if worker.url in leaving),
        in_step=not removals and not missing and not any(update.key_changed for update in updates),
    )
