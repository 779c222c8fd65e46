"""Pods for the tests of the agent, and the checkpoints that they move between."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from sglang_rollout.agent import control, draining, rank0_watch
from sglang_rollout.protocol.weights import WeightVersion
from sglang_rollout.transfer.intake import TrainerIntake

from . import checkpoints
from .fake_pod import FakePod, MakePod


class Versions:
    """Checkpoints of one shape, by label."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fills: dict[str, int] = {}

    def __call__(self, label: str) -> WeightVersion:
        """Each of other bytes."""
        self._fills.setdefault(label, len(self._fills) + 1)
        folder = checkpoints.write(self._folder / f"v{label}", fill=self._fills[label])
        return WeightVersion(label, str(folder))


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TICK_SECONDS", "STARTING_TICK_SECONDS", "REPEAT_SECONDS", "DRAIN_TICK_SECONDS"):
        monkeypatch.setattr(control, name, 0.05)
    monkeypatch.setattr(draining, "LINGER_SECONDS", 0.2)
    monkeypatch.setattr(rank0_watch, "LOOK_SECONDS", 0.1)


@pytest.fixture(autouse=True)
def _no_receiving_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async def warm(self: TrainerIntake) -> None:
        """It would import torch."""

    monkeypatch.setattr(TrainerIntake, "warm", warm)


@pytest.fixture
def versions(tmp_path: Path) -> Versions:
    return Versions(tmp_path / "models")


@pytest_asyncio.fixture
async def make_pod(tmp_path: Path, versions: Versions) -> AsyncIterator[MakePod]:
    made: list[FakePod] = []

    async def make(**settings: Any) -> FakePod:
        pod = FakePod(tmp_path / f"pod{len(made)}", versions("1"), **settings)
        made.append(pod)
        await pod.start_agent()
        return pod

    yield make
    for pod in made:
        await pod.close()


@pytest_asyncio.fixture
async def serving(make_pod: MakePod) -> FakePod:
    """A pod whose engine serves version 1."""
    pod = await make_pod()
    await pod.launch()
    await pod.serving()
    return pod
