"""The end of a copy that was broken off, with a torch whose copies end when the test says so."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_rollout.transfer.transports import TransportBroken, TransportUnable, peer_copy
from sglang_rollout.transfer.transports.available import stuck
from sglang_rollout.transfer.transports.peer_copy import PeerCopyReceiver


class Copy:
    """Of one call: ended after it was looked at `looks` times."""

    def __init__(self, looks: float, receiver: PeerCopyReceiver, *, aborted: bool) -> None:
        self.looks = looks
        self._receiver, self._aborted = receiver, aborted
        self.ordered = 0

    def copy_(self, source: Any, non_blocking: bool) -> None:
        self.ordered += 1
        if self._aborted:
            self._receiver.abort()

    def query(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def record_event(self) -> Copy:
        return self


@pytest.fixture(autouse=True)
def nothing_is_stuck() -> Iterator[None]:
    yield
    peer_copy._GOING_ON.clear()


def run(
    monkeypatch: pytest.MonkeyPatch, looks: float, *, aborted: bool = False, late: bool = False, before: bool = False
) -> Copy:
    receiver = PeerCopyReceiver({}, 0)
    copy = Copy(looks, receiver, aborted=aborted)
    cuda = SimpleNamespace(Stream=lambda device: copy, stream=lambda stream: contextlib.nullcontext())
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    # A tick of this clock is a second: whoever waits for what does not end looks once.
    ticks = iter(range(1000))
    monkeypatch.setattr(peer_copy, "time", SimpleNamespace(monotonic=lambda: next(ticks), sleep=lambda seconds: None))
    if before:
        receiver.abort()
    try:
        receiver._copy(copy, None, 1 if late else math.inf)
    except TransportBroken:
        return copy
    assert not any((aborted, late, before))
    return copy


def test_a_copy_that_ends_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, 5)
    assert peer_copy._GOING_ON == []


@pytest.mark.parametrize("how", ["aborted", "late"])
def test_a_copy_that_is_broken_off_is_waited_for(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(peer_copy, "SETTLE_SECONDS", 100)
    copy = run(monkeypatch, 20, **{how: True})
    assert copy.looks < 0
    assert not stuck()


@pytest.mark.parametrize("how", ["aborted", "late"])
def test_one_that_does_not_end_is_told_of(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    run(monkeypatch, math.inf, **{how: True})
    assert stuck()


def test_no_other_group_begins_before_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would write over what the other has brought to the same place, after that was checked."""
    copy = run(monkeypatch, math.inf, aborted=True)
    with pytest.raises(TransportUnable, match="has not ended"):
        PeerCopyReceiver({}, 0).join(5)
    copy.looks = 2
    with pytest.raises(TransportUnable, match="cannot be read"):  # it goes on to the trainer's memory
        PeerCopyReceiver({}, 0).join(5)
    assert not stuck()


def test_none_is_begun_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, 0, before=True).ordered == 0
    assert not stuck()
