"""Tensors without torch: the client cuts them by a module of the same words."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from sglang_rollout.client import RolloutFleet
from sglang_rollout.client.generation import Router
from sglang_rollout.client.room import SenderRoom
from sglang_rollout.transfer.groups import GroupKeeper
from sglang_rollout.transfer.manifest import ManifestRefused
from tests.transfer.fake_transport import Bytes, FakeTransport, one

from .fake_fleet import FakeApi, FakeOperator

WEIGHTS = {"a": b"a" * 100, "b": b"b" * 200, "c": b"c" * 300}
REFERENCE = {name: one(name, data).bucket.tensors[0] for name, data in WEIGHTS.items()}


def _described(name: str, tensor: object) -> None:
    if not isinstance(tensor, bytes):
        raise ManifestRefused(f"{name!r} is a {type(tensor).__name__}: send torch tensors")


def _buckets_of(named: Iterable[tuple[str, bytes]], bucket_bytes: int) -> Iterator[Bytes]:
    for name, data in named:
        _described(name, data)
        yield one(name, data)


class Scene:
    def __init__(self, folder: Path) -> None:
        self.api = FakeApi()
        self.transport = FakeTransport()
        self.operator = FakeOperator(self.api, folder, self.transport, REFERENCE)
        self.operator.start()
        self.clients: list[RolloutFleet] = []
        self.fleet = self.client()

    def client(self, name: str = "fleet") -> RolloutFleet:
        fleet = RolloutFleet(self.api, name, address="127.0.0.1", router=Router(dict))  # type: ignore[arg-type]
        self.clients.append(fleet)
        return fleet


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    words = types.ModuleType("outgoing")
    words.buckets_of, words.described = _buckets_of, _described  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang_rollout.transfer.outgoing", words)
    scene = Scene(tmp_path)
    keepers: dict[int, GroupKeeper] = {}

    def keeper(room: SenderRoom, transport: str, host: str) -> GroupKeeper:
        return keepers.setdefault(id(room), GroupKeeper([scene.transport], host=host))

    monkeypatch.setattr(SenderRoom, "keeper", keeper)
    yield scene
    scene.operator.stopped = True
    scene.operator.join(10)
    for fleet in scene.clients:
        fleet.close()
