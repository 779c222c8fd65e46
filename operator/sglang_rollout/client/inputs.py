"""What can be told of the arguments of a call before anything is asked of a fleet: PublishRefused says what to give
instead."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

from ..api.weights import Transport
from ..transfer.link import host_port
from ..transfer.manifest import ManifestRefused
from ..transfer.session import SessionError
from .asking import Transfer
from .errors import PublishRefused

LEAST_BUCKET = 1 << 16

AgainAndAgain = Mapping[str, Any] | Callable[[], Iterable[tuple[str, Any]]]
NamedTensors = AgainAndAgain | Iterable[tuple[str, Any]]


def check_label(version: object) -> None:
    if not isinstance(version, str):
        raise PublishRefused(f"version {version!r} is {_kind(version)}: give a string, such as {str(version)!r}")


def check_timeout(timeout: object) -> None:
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise PublishRefused(f"timeout {timeout!r} is {_kind(timeout)}: give seconds")
    if not 0 < timeout < math.inf:
        raise PublishRefused(f"timeout {timeout:g} is no time to wait for: give seconds")


def check_way(transfer: str, transport: str, bucket_bytes: int | None) -> None:
    for what, given, known in (
        ("transfer", transfer, get_args(Transfer)),
        ("transport", transport, get_args(Transport)),
    ):
        if given not in known:
            raise PublishRefused(f"{what} {given!r} is none of {', '.join(known)}")
    if bucket_bytes is not None and bucket_bytes < LEAST_BUCKET:
        raise PublishRefused(f"bucket_bytes {bucket_bytes} is too small: use at least 64 KiB, or leave it out")


def check_senders(senders: Sequence[str], rank: int, own: str) -> None:
    """own: host:port of this rank's sender."""
    if not 0 <= rank < len(senders):
        raise PublishRefused(f"rank {rank} is none of the {len(senders)} senders")
    if senders[rank] != own:
        raise PublishRefused(f"senders[{rank}] is {senders[rank]}, and this rank listens at {own}")
    try:
        for one in senders:
            host_port(one)
    except SessionError as error:
        raise PublishRefused(f"senders: {error}") from error


def check_tensors(named_tensors: object, transfer: str) -> None:
    if hasattr(named_tensors, "state_dict"):
        raise PublishRefused(f"{_kind(named_tensors)} is no tensors: give its state_dict()")
    again = isinstance(named_tensors, Mapping) or callable(named_tensors)
    if not again and (isinstance(named_tensors, str) or not isinstance(named_tensors, Iterable)):
        raise PublishRefused(f"{_kind(named_tensors)} is no tensors: give a mapping, or (name, tensor) one by one")
    if transfer != "Staged" and not again:
        raise PublishRefused(f"transfer {transfer} needs a mapping of tensors or a function that gives them")


def check_mapping(named_tensors: Mapping[str, Any], described: Callable[[str, Any], object]) -> None:
    if not named_tensors:
        raise PublishRefused("there are no tensors: give all tensors of the model")
    try:
        for name, tensor in named_tensors.items():
            described(name, tensor)
    except ManifestRefused as error:
        raise PublishRefused(str(error)) from error


def pairs(named_tensors: NamedTensors) -> Iterable[tuple[str, Any]]:
    if isinstance(named_tensors, Mapping):
        return named_tensors.items()
    return named_tensors() if callable(named_tensors) else named_tensors


def _kind(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
