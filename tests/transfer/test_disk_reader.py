"""Checkpoints into the stage: single and sharded alike, and every broken one is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_rollout.transfer.checkpoint_files import CheckpointUnusable, stored_tensors
from sglang_rollout.transfer.digests import BLAKE2B
from sglang_rollout.transfer.disk_reader import Reading, StagingStopped, stage_checkpoint
from sglang_rollout.transfer.manifest import Tensor
from sglang_rollout.transfer.stage import BytesRefused, Stage, reserve_host

from .test_stage import SLOT, staged_bytes
from .weights import some_weights, write_checkpoint


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return reserve_host(tmp_path / "stage", SLOT, 1)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
def test_staged_whatever_the_files_are(tmp_path: Path, stage: Stage, shards: int, bucket_bytes: int) -> None:
    weights = some_weights()
    folder = write_checkpoint(tmp_path / "model", weights, shards=shards)
    seen: list[tuple[int, int]] = []
    reference = {name: tensor for name, (tensor, _) in weights.items()}
    reading = Reading(
        folder, "v1", BLAKE2B, reference, bucket_bytes=bucket_bytes, progress=lambda done, of: seen.append((done, of))
    )
    manifest = stage_checkpoint(stage, "a", reading)
    assert staged_bytes(stage.folder, manifest.root) == {name: data for name, (_, data) in weights.items()}
    assert seen[-1] == (manifest.size, manifest.size)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_equal_checkpoints_have_one_root(tmp_path: Path, stage: Stage) -> None:
    folder = write_checkpoint(tmp_path / "model", some_weights(3))
    roots = {stage_checkpoint(stage, "a", Reading(folder, v, BLAKE2B)).root for v in ("v1", "v2")}
    other = write_checkpoint(tmp_path / "other", some_weights(4))
    roots.add(stage_checkpoint(stage, "a", Reading(other, "v3", BLAKE2B)).root)
    assert len(roots) == 2


def test_another_model_is_refused_before_a_byte_is_read(tmp_path: Path, stage: Stage) -> None:
    folder = write_checkpoint(tmp_path / "model", some_weights())
    reference = {name: tensor for name, (tensor, _) in some_weights().items()} | {"gone": Tensor("gone", "U8", (1,))}
    with pytest.raises(BytesRefused, match=f"the tensors of {folder} lack gone"):
        stage_checkpoint(stage, "a", Reading(folder, "v1", BLAKE2B, reference))
    stage_checkpoint(stage, "a", Reading(folder, "v1", BLAKE2B, reference, tied_names=frozenset({"gone"})))


def test_nan_in_a_checkpoint_is_refused(tmp_path: Path, stage: Stage) -> None:
    weights = some_weights()
    tensor, data = weights["embed.weight"]
    weights["embed.weight"] = (tensor, data[:-2] + b"\xc0\x7f")
    folder = write_checkpoint(tmp_path / "model", weights)
    with pytest.raises(BytesRefused, match=r"embed.weight \(1\)"):
        stage_checkpoint(stage, "a", Reading(folder, "v1", BLAKE2B, bucket_bytes=1))
    assert stage.slots[0].sealed is None


def test_stopped_in_the_middle(tmp_path: Path, stage: Stage) -> None:
    folder = write_checkpoint(tmp_path / "model", some_weights())
    read: list[int] = []
    reading = Reading(
        folder,
        "v1",
        BLAKE2B,
        bucket_bytes=1,
        threads=1,
        progress=lambda done, of: read.append(done),
        stopped=lambda: len(read) >= 2,
    )
    with pytest.raises(StagingStopped, match="staging of v1 was stopped"):
        stage_checkpoint(stage, "a", reading)
    assert len(read) == 2
    assert stage.slots[0].sealed is None


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def _cut_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:20])


def _no_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _lost_shard(folder: Path) -> None:
    write_checkpoint(folder, some_weights(), shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()


def _wrong_index(folder: Path) -> None:
    write_checkpoint(folder, some_weights(), shards=2)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("embed.weight", "embed.weights"))


def _twice(folder: Path) -> None:
    (folder / "copy.safetensors").write_bytes((folder / "model.safetensors").read_bytes())


def _other_type(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"F8_E4M3"', b'"F4_E2M1"'))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (_cut, "is cut off at tensor step: is it still being written"),
        (_cut_header, "ends within its header"),
        (_no_file, "holds no .*safetensors file"),
        (_lost_shard, "does not exist: is it still being written"),
        (_wrong_index, "lacks embed.weights where"),
        (_twice, "is in .* and in"),
        (_other_type, "tensor layers.0.scale is of type 'F4_E2M1'"),
    ],
)
def test_broken_checkpoints(tmp_path: Path, damage: Callable[[Path], None], sentence: str) -> None:
    folder = write_checkpoint(tmp_path / "model", some_weights())
    damage(folder)
    with pytest.raises(CheckpointUnusable, match=sentence):
        stored_tensors(folder)
