"""Many copies as few: what is ordered at once writes the bytes that the model's own loading writes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from sglang_rollout.engine.loader.obey import LoaderState, obey
from sglang_rollout.engine.loader.plans import StagedManifest
from sglang_rollout.engine.loader.rehearsal import Copy, Fill, Step
from sglang_rollout.engine.loader.runs import Rows, alone_in_place, divided, runs_of
from sglang_rollout.transfer.digests import BLAKE2B
from sglang_rollout.transfer.hook_call import Action, HookCall
from sglang_rollout.transfer.manifest import Manifest, Tensor, plan_buckets
from sglang_rollout.transfer.stage import Stage, reserve_host
from sglang_rollout.transfer.stage_index import ENV_FOLDER, read_index, read_manifest
from tests.transfer.weights import finite_bytes

from .models import ExpertModel

TENSORS = [Tensor(name, "BF16", shape) for name, shape in ExpertModel.shapes().items()]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setenv(ENV_FOLDER, str(tmp_path))
    return reserve_host(tmp_path, 1 << 16, 2)


def values(tensor: Tensor, seed: int) -> bytes:
    return bytes(finite_bytes(tensor, seed + sum(tensor.name.encode())))


def staged(stage: Stage, slot: str, tensors: list[Tensor], bucket: int, seed: int) -> Manifest:
    writer = stage.write(slot, BLAKE2B)
    for one in plan_buckets(tensors, bucket):
        with writer.fill(writer.place(one)) as view:
            for tensor, offset in one.placed():
                view[offset : offset + tensor.size] = values(tensor, seed)
    return writer.seal(f"v{seed}")


def own(model: ExpertModel, seed: int) -> ExpertModel:
    """As the model loads by itself."""
    model.load_weights(
        (t.name, torch.frombuffer(bytearray(values(t, seed)), dtype=torch.bfloat16).view(t.shape)) for t in TENSORS
    )
    return model


def called(model: ExpertModel, action: Action, root: str, state: LoaderState) -> None:
    report = obey(model, [HookCall(action, "t1", "v1", root).to_name()], state)
    assert report is not None
    assert report.good, report.problem


def same(one: ExpertModel, two: ExpertModel) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


@pytest.mark.parametrize(("world", "rank"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("seed", range(4))
def test_experts_in_any_order_and_buckets_of_any_size(stage: Stage, seed: int, world: int, rank: int) -> None:
    chance = random.Random(seed)
    model, state = ExpertModel(rank=rank, world=world), LoaderState()
    for number in (1, 2, 3):
        tensors = list(TENSORS)
        if seed:
            chance.shuffle(tensors)
        bucket = chance.choice([60, 500, 1 << 20])
        manifest = staged(stage, "ab"[number % 2], tensors, bucket, number)
        called(model, Action.APPLY, manifest.root, state)
        assert same(model, own(ExpertModel(rank=rank, world=world), number))


def test_an_order_of_another_sender_needs_no_new_trial(stage: Stage) -> None:
    model, state = ExpertModel(), LoaderState()
    one = staged(stage, "a", TENSORS, 500, 1)
    called(model, Action.CHECK, one.root, state)
    two = staged(stage, "b", TENSORS[::-1], 500, 2)
    assert one.layout == two.layout
    assert one.placing != two.placing
    report = obey(model, [HookCall(Action.APPLY, "t1", "v1", two.root).to_name()], state)
    assert report is not None
    assert "rehearse" not in report.seconds
    assert same(model, own(ExpertModel(), 2))


def test_the_experts_of_a_layer_are_two_copies(stage: Stage) -> None:
    model, state = ExpertModel(), LoaderState()
    root = staged(stage, "a", TENSORS, 1 << 20, 1).root
    called(model, Action.CHECK, root, state)
    slot = read_index(stage.folder).holding(root)
    plans = state.models[id(model)]
    assert state.stage is not None
    manifest = StagedManifest(slot, lambda held: read_manifest(stage.folder, held))
    plan, made = plans.plan(manifest.layout, lambda: manifest.whole.tensors.values())
    ready = plans.make_ready(plan, state.stage, slot, manifest)
    assert not made
    assert sorted(tuple(target.shape) for target, _ in ready.copies) == [(8, 6), (8, 6), (8, 12), (8, 12)]
    assert ready.steps == []
    assert ready.small == ([], [])


def test_a_second_slot_needs_no_manifest(stage: Stage) -> None:
    model, state = ExpertModel(), LoaderState()
    called(model, Action.CHECK, staged(stage, "a", TENSORS, 500, 1).root, state)
    two = staged(stage, "b", TENSORS, 500, 2)
    (stage.folder / "b.manifest.json").unlink()
    called(model, Action.APPLY, two.root, state)
    assert same(model, own(ExpertModel(), 2))


def test_what_cannot_be_found_out_is_refused_unwritten(stage: Stage) -> None:
    model, state = ExpertModel(), LoaderState()
    called(model, Action.CHECK, staged(stage, "a", TENSORS, 500, 1).root, state)
    two = staged(stage, "b", TENSORS, 60, 2)
    (stage.folder / "b.manifest.json").unlink()
    report = obey(model, [HookCall(Action.APPLY, "t1", "v1", two.root).to_name()], state)
    assert report is not None
    assert "cannot be read" in report.problem
    assert not report.written


def test_what_jumps_back_or_lies_in_another_region_is_not_folded() -> None:
    held = torch.zeros(64)
    steps = [Copy(held[4 * n : 4 * n + 4], str(n), (4,), (1,), 0) for n in range(8)]
    pieces, rest = divided(steps)
    assert rest == []
    assert [run.count for run in runs_of(pieces, {str(n): (0, 100 * n) for n in range(8)})] == [8]
    assert [run.count for run in runs_of(pieces, {str(n): (0, 900 - 100 * n) for n in range(8)})] == [1] * 8
    assert [run.count for run in runs_of(pieces, {str(n): (n // 4, 100 * n) for n in range(8)})] == [4, 4]
    assert [run.count for run in runs_of(pieces, {str(n): (0, 100 * n + (n > 4)) for n in range(8)})] == [5, 1, 1, 1]
    joined = runs_of(pieces, {str(n): (0, 16 * n) for n in range(8)})
    assert [(run.count, run.rows) for run in joined] == [(1, Rows(1, 128))]


def test_parameters_that_happen_to_lie_side_by_side_are_not_joined() -> None:
    memory = bytearray(32)
    one, two = (torch.frombuffer(memory, dtype=torch.float32, count=4, offset=begin) for begin in (0, 16))
    steps = [Copy(one, "a", (4,), (1,), 0), Copy(two, "b", (4,), (1,), 0)]
    pieces, _ = divided(steps)
    assert len(runs_of(pieces, {"a": (0, 0), "b": (0, 16)})) == 2


def test_what_is_converted_turned_or_met_by_others_stays_as_it_was() -> None:
    held = torch.zeros(4, 4)
    steps: list[Step] = [
        Copy(held[0], "a", (4,), (1,), 0, converts=True),
        Copy(held[1], "b", (4,), (2,), 0),
        Copy(held[2], "c", (4,), (1,), 0),
        Fill(held[2, 2:], 1.0),
        Copy(held[3], "d", (4,), (1,), 0),
    ]
    pieces, rest = divided(steps)
    assert [piece.name for piece in pieces] == ["d"]
    assert rest == steps[:4]


def test_copies_whose_places_overlap_keep_their_order() -> None:
    held = torch.zeros(16)
    rows = held.view(4, 4)
    steps: list[Copy | Fill] = [
        Copy(held[:4], "a", (4,), (1,), 0),
        Fill(held[2:6], 1.0),
        Copy(held[8:12], "b", (4,), (1,), 0),
        Copy(rows[:, 3], "c", (4,), (1,), 0),
        Copy(torch.zeros(4), "d", (4,), (1,), 0),
        Copy(torch.zeros(0), "e", (0,), (1,), 0),
    ]
    # The column reaches over the second half of the first copy and over all of the third.
    assert alone_in_place(steps) == [False, False, False, False, True, True]
    assert alone_in_place(steps[4:]) == [True, True]
    assert alone_in_place([]) == []
