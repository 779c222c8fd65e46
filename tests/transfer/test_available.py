"""Which transports an agent offers for a stage in GPU memory, with a torch that only knows which GPUs there are."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_rollout.transfer.stage_index import Region, device_index
from sglang_rollout.transfer.transports import NCCL, PEER_COPY
from sglang_rollout.transfer.transports.available import agent_transports, sender_transports

FIRST, SECOND = "GPU-ff", "GPU-00"


def see(monkeypatch: pytest.MonkeyPatch, *gpus: str, current: int = 0) -> None:
    cuda = SimpleNamespace(
        is_available=lambda: bool(gpus),
        current_device=lambda: current,
        device_count=lambda: len(gpus),
        get_device_properties=lambda ordinal: SimpleNamespace(uuid=gpus[ordinal]),
    )
    distributed = SimpleNamespace(
        is_available=lambda: True, is_nccl_available=lambda: True, is_gloo_available=lambda: True
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, distributed=distributed))
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)


def offers(monkeypatch: pytest.MonkeyPatch, folder: Path, *stage: str) -> dict[str, dict[str, str]]:
    device_index(folder, [[Region(8, gpu=gpu, handle="00") for gpu in stage]])
    return {one.name: offer for one in agent_transports(folder) if (offer := one.offer()) is not None}


def test_the_first_gpu_that_is_seen_receives_for_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not the one with the least UUID: a pod decides by the order of its GPUs."""
    see(monkeypatch, FIRST, SECOND)
    found = offers(monkeypatch, tmp_path, SECOND, FIRST)
    assert found[NCCL] == {"gpu": FIRST}
    assert (found[PEER_COPY]["gpu"], found[PEER_COPY]["sees"]) == (FIRST, f"{FIRST},{SECOND}")


@pytest.mark.parametrize(("trainer", "by_nccl"), [(0, False), (1, True)])
def test_a_trainer_beside_ranks_of_the_engine_is_reached_from_the_other_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trainer: int, by_nccl: bool
) -> None:
    see(monkeypatch, FIRST, SECOND)
    found = offers(monkeypatch, tmp_path, FIRST, SECOND)
    see(monkeypatch, FIRST, SECOND, current=trainer)
    suits = {one.name: one.suits([found[one.name]]) for one in sender_transports()}
    assert suits == {PEER_COPY: True, NCCL: by_nccl, "Gloo": True}


def test_a_stage_on_another_gpu_than_the_first_is_received_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    see(monkeypatch, FIRST, SECOND)
    assert offers(monkeypatch, tmp_path, SECOND)[NCCL] == {"gpu": SECOND}
