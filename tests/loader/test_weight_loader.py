"""The weight loader on small models: what is staged gets in whole, what must not is refused unwritten."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sglang_rollout.engine.loader.obey import LoaderState, obey
from sglang_rollout.engine.loader.rehearsal import RehearsalImpossible, rehearse
from sglang_rollout.engine.weight_loader import load
from sglang_rollout.transfer.digests import BLAKE2B
from sglang_rollout.transfer.hook_call import Action, HookCall
from sglang_rollout.transfer.hook_report import HookReport, read_reports
from sglang_rollout.transfer.manifest import Manifest, Tensor, plan_buckets
from sglang_rollout.transfer.stage import Stage, reserve_host
from sglang_rollout.transfer.stage_index import ENV_FOLDER, write_running
from tests.transfer.weights import finite_bytes

from .models import (
    ConvertingModel,
    DerivingModel,
    FusedModel,
    LookingModel,
    ReadingModel,
    TableModel,
    ThreadedModel,
    TurningModel,
)

SHAPES = {
    "embed.weight": Tensor("embed.weight", "BF16", (16, 8)),
    "q": Tensor("q", "BF16", (8, 8)),
    "k": Tensor("k", "BF16", (4, 8)),
    "v": Tensor("v", "BF16", (4, 8)),
    "norm": Tensor("norm", "F32", (8,)),
    "head": Tensor("head", "BF16", (16, 8)),
}


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setenv(ENV_FOLDER, str(tmp_path))
    return reserve_host(tmp_path, 1 << 16, 2)


def staged(stage: Stage, version: str, shapes: Mapping[str, Tensor] = SHAPES, seed: int = 0) -> Manifest:
    slot = stage.free_slot("").name
    writer = stage.write(slot, BLAKE2B)
    for bucket in plan_buckets(shapes.values(), 300):
        with writer.fill(writer.place(bucket)) as view:
            for tensor, offset in bucket.placed():
                view[offset : offset + tensor.size] = finite_bytes(tensor, seed + sum(tensor.name.encode()))
    return writer.seal(version)


def called(
    model: torch.nn.Module, action: Action, root: str = "", state: LoaderState | None = None, **more: object
) -> HookReport:
    call = replace(HookCall(action, "t1", "v1", root), **more)  # type: ignore[arg-type]
    report = obey(model, [call.to_name()], state or LoaderState())
    assert report is not None
    assert read_reports(Path(os.environ[ENV_FOLDER]), "t1", str(action)) == [report]
    return report


def contents(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.data.clone() for name, parameter in model.named_parameters()}


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name].view(torch.uint8), two[name].view(torch.uint8)) for name in one)


def test_check_writes_nothing_and_apply_all(stage: Stage) -> None:
    model, state = FusedModel(), LoaderState()
    one, two = staged(stage, "v1", seed=1), staged(stage, "v2", seed=2)
    before = contents(model)
    for manifest in (one, two):
        report = called(model, Action.CHECK, manifest.root, state)
        assert report.good, report
        assert not report.written
    assert same(contents(model), before)
    results = []
    for manifest in (one, two, one):
        report = called(model, Action.APPLY, manifest.root, state)
        assert report.good, report
        assert report.compared == "equal"
        assert report.written
        results.append((contents(model), report.sums_digest))
    assert same(results[0][0], results[2][0])
    assert not same(results[0][0], results[1][0])
    assert results[0][1] == results[2][1] != results[1][1]
    expected = torch.frombuffer(bytearray(finite_bytes(SHAPES["k"], 1 + ord("k"))), dtype=torch.bfloat16).view(4, 8)
    assert torch.equal(model.qkv.data[8:12], expected)
    assert called(model, Action.SUMS, state=state).sums_digest == results[0][1]


def test_a_layout_is_rehearsed_once(stage: Stage) -> None:
    model, state = FusedModel(), LoaderState()
    one, two = staged(stage, "v1", seed=1), staged(stage, "v2", seed=2)
    assert "rehearse" in called(model, Action.REGISTER, state=state).seconds
    assert "rehearse" not in called(model, Action.CHECK, one.root, state).seconds
    assert "rehearse" not in called(model, Action.CHECK, two.root, state).seconds


def test_what_the_engine_runs_is_tried_before_anything_is_staged(stage: Stage) -> None:
    model, state = FusedModel(), LoaderState()
    write_running(stage.folder, reversed(SHAPES.values()))
    before = contents(model)
    layouts = called(model, Action.REGISTER, state=state).layouts
    assert same(contents(model), before)
    one = staged(stage, "v1", seed=1)
    assert layouts == (one.layout,)
    report = called(model, Action.APPLY, one.root, state)
    assert "rehearse" not in report.seconds
    assert report.compared == "equal"


def test_another_model_than_the_engine_s_is_registered_all_the_same(stage: Stage) -> None:
    """A draft model has other tensors."""
    write_running(stage.folder, altered(k=None).values())
    report = called(FusedModel(), Action.REGISTER)
    assert report.good
    assert report.layouts == ()


def altered(**changes: Tensor | None) -> dict[str, Tensor]:
    shapes: dict[str, Tensor | None] = {**SHAPES, **changes}
    return {name: tensor for name, tensor in shapes.items() if tensor is not None}


@pytest.mark.parametrize(
    ("shapes", "sentence"),
    [
        (altered(k=None), r"would keep their old bytes: qkv \(192 of 256 bytes\)"),
        (altered(norm=None, head=None), r"norm \(0 of 32 bytes\), head \(0 of 256 bytes\)"),
        (altered(k=Tensor("k", "BF16", (4, 9))), r"cannot load tensor k: AssertionError: k: \(4, 8\) is not \(4, 9\)"),
        (altered(q=Tensor("q", "BF16", (4, 8))), "cannot load tensor q: RuntimeError: start"),
        (altered(norm=Tensor("norm", "F32", (9,))), r"tensor norm: \[9\] does not fit into \[8\] of norm"),
        (altered(norm=Tensor("norm", "F32", (1,))), r"tensor norm: \[1\] does not fit into \[8\] of norm"),
        (altered(head=Tensor("head", "BF16", (8,))), r"tensor head: \[8\] does not fit into \[16, 8\] of head"),
    ],
)
def test_what_the_model_cannot_take_is_refused(stage: Stage, shapes: dict[str, Tensor], sentence: str) -> None:
    model = FusedModel()
    before = contents(model)
    root = staged(stage, "v1", shapes).root
    for action in (Action.CHECK, Action.APPLY):
        with pytest.raises(AssertionError, match=sentence):
            _good(called(model, action, root))
    assert same(contents(model), before)


def _good(report: HookReport) -> None:
    assert not report.written
    assert not report.problem, report.problem


def test_another_digest_is_refused(stage: Stage) -> None:
    model = FusedModel()
    before = contents(model)
    staged(stage, "v1")
    for action in (Action.CHECK, Action.APPLY):
        report = called(model, action, "0" * 64)
        assert "weights with digest 000000000000 are not staged here: the stage holds v1" in report.problem
        assert not report.written
    assert same(contents(model), before)


def test_no_stage_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_FOLDER, str(tmp_path / "none"))
    assert "there is no stage" in called(FusedModel(), Action.REGISTER).problem


def test_unknown_tensors_and_conversions_are_noted(stage: Stage) -> None:
    extra = altered(other=Tensor("other", "U8", (8,)), norm=Tensor("norm", "BF16", (8,)))
    report = called(FusedModel(), Action.APPLY, staged(stage, "v1", extra).root)
    assert report.good
    assert report.notes == ("the model makes no use of other", "converted to the model's type: norm")
    assert report.compared == "not held against the stage: not all bytes are loaded as they are"


def test_tied_embeddings(stage: Stage) -> None:
    report = called(FusedModel(tied=True), Action.APPLY, staged(stage, "v1", altered(head=None)).root)
    assert report.good, report.problem
    assert report.compared == "equal"


def test_each_rank_takes_its_part(stage: Stage) -> None:
    root = staged(stage, "v1").root
    ranks = [FusedModel(rank=rank, world=2) for rank in range(2)]
    for model in ranks:
        assert called(model, Action.CHECK, root).good
        obey(model, [HookCall(Action.APPLY, "t1", "v1", root, sums=False).to_name()], LoaderState())
    whole = FusedModel()
    called(whole, Action.APPLY, root)
    assert torch.equal(torch.cat([model.qkv.data[:4] for model in ranks]), whole.qkv.data[:8])


@pytest.mark.parametrize("kind", [ThreadedModel, ReadingModel])
def test_what_cannot_be_rehearsed_is_not_written_by_trying(stage: Stage, kind: type[FusedModel]) -> None:
    model = kind()
    before = contents(model)
    root = staged(stage, "v1").root
    report = called(model, Action.CHECK, root)
    assert same(contents(model), before)
    assert report.good
    assert report.notes[0].startswith("whether the model can take every tensor was not tried")
    assert called(model, Action.APPLY, root).good
    assert not same(contents(model), before)


def test_a_call_for_another_model_is_not_answered(stage: Stage) -> None:
    call = HookCall(Action.CHECK, "t1", model="LlamaForCausalLMEagle3")
    assert obey(FusedModel(), [call.to_name()], LoaderState()) is None


def test_the_stage_given_up_in_the_middle_is_a_failure(stage: Stage) -> None:
    root = staged(stage, "v1").root

    class Slow(ReadingModel):  # whose own load_weights is called each time
        def load_weights(self, weights: object) -> None:
            super().load_weights(weights)  # type: ignore[arg-type]
            if next(iter(self.parameters())).data_ptr() and self.armed:
                stage.write("a", BLAKE2B)

        armed = False

    model, state = Slow(), LoaderState()
    assert called(model, Action.CHECK, root, state).good
    model.armed = True
    report = called(model, Action.APPLY, root, state)
    assert report.written
    assert "given up while it was being loaded" in report.problem


def test_bytes_that_change_under_the_copy_are_noticed(stage: Stage) -> None:
    root = staged(stage, "v1").root
    data = stage.folder / "a.bytes"
    raw = bytearray(data.read_bytes())
    raw[3] ^= 1
    data.write_bytes(raw)
    report = called(FusedModel(), Action.APPLY, root)
    assert report.compared == "different"
    assert "sums differ" in report.problem


@pytest.mark.parametrize("names", [[], ["model.embed_tokens.weight"], ["a", "b"]])
def test_it_never_raises(stage: Stage, names: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    load(FusedModel(), [(name, torch.zeros(1)) for name in names])
    load(None, [(HookCall(Action.CHECK, "t").to_name(), torch.zeros(1))])
    load(FusedModel(), None)
    assert "weight loader: " in "".join(capfd.readouterr())


def test_models_that_cannot_be_watched_say_so() -> None:
    with pytest.raises(RehearsalImpossible):
        rehearse(ReadingModel(), SHAPES.values())


@pytest.mark.parametrize(
    ("kind", "by_copies"),
    [(FusedModel, True), (TurningModel, True), (DerivingModel, False), (ConvertingModel, False)],
)
def test_recorded_copies_do_what_the_model_does(stage: Stage, kind: type[FusedModel], by_copies: bool) -> None:
    """What is more than copies is left to the model's own loading."""
    one, two = staged(stage, "v1", seed=1), staged(stage, "v2", seed=2)
    model, state = kind(), LoaderState()
    assert called(model, Action.REGISTER, state=state).layouts == (one.layout,)
    for manifest, seed in ((one, 1), (two, 2), (one, 1)):
        report = called(model, Action.CHECK, manifest.root, state)
        assert ("ready" in report.seconds) is by_copies
        report = called(model, Action.APPLY, manifest.root, state)
        assert report.good, report.problem
        assert (report.compared == "equal") is (kind is FusedModel)
        own = kind()
        own.load_weights((name, as_tensor(tensor, seed)) for name, tensor in SHAPES.items())
        assert same(contents(model), contents(own))
        assert torch.equal(model.doubled(), own.doubled())


def as_tensor(tensor: Tensor, seed: int) -> torch.Tensor:
    data = bytearray(finite_bytes(tensor, seed + sum(tensor.name.encode())))
    kind = torch.float32 if tensor.dtype == "F32" else torch.bfloat16
    return torch.frombuffer(data, dtype=kind).view(tensor.shape)


def test_replaced_parameters_are_found_again(stage: Stage) -> None:
    root = staged(stage, "v1").root
    model, state = FusedModel(), LoaderState()
    assert called(model, Action.APPLY, root, state).good
    expected = contents(model)
    model.qkv = torch.nn.Parameter(torch.zeros_like(model.qkv), requires_grad=False)
    assert called(model, Action.APPLY, root, state).good
    assert same(contents(model), expected)


def test_a_stage_that_was_made_anew_is_mapped_anew(stage: Stage) -> None:
    model, state = FusedModel(), LoaderState()
    assert called(model, Action.APPLY, staged(stage, "v1", seed=1).root, state).good
    other = reserve_host(stage.folder, 1 << 17, 2)
    assert called(model, Action.APPLY, staged(other, "v2", seed=2).root, state).good
    whole = FusedModel()
    whole.load_weights((name, as_tensor(tensor, 2)) for name, tensor in SHAPES.items())
    assert same(contents(model), contents(whole))


def test_a_table_that_is_looked_up_is_no_weight() -> None:
    found = rehearse(TableModel(), SHAPES.values())
    assert found.problems == ()
    assert found.steps is not None, found.more
    assert found.keeps_words
    looking = rehearse(LookingModel(), SHAPES.values())
    assert looking.steps is None
    assert "item reads values" in looking.more
