"""Which checkpoints a running engine may load, and what is said of those that it may not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_rollout.agent.checkpoint import CheckpointRefused, compare, read_checkpoint

from .checkpoints import CONFIG, TENSORS, safetensors, write


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in TENSORS.items() if key != name}


def refusal(folder: Path, running: Path) -> str:
    with pytest.raises(CheckpointRefused) as refused:
        compare(read_checkpoint(folder), read_checkpoint(running), folder)
    return str(refused.value)


@pytest.fixture
def running(tmp_path: Path) -> Path:
    return write(tmp_path / "v1")


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_the_same_shape_is_accepted(tmp_path: Path, running: Path, shards: int) -> None:
    offered = write(tmp_path / "v2", shards=shards)
    compare(read_checkpoint(offered), read_checkpoint(running), offered)


@pytest.mark.parametrize("files_not_in_the_index", ["consolidated.safetensors"])
def test_files_that_the_index_does_not_name_do_not_count(
    tmp_path: Path, running: Path, files_not_in_the_index: str
) -> None:
    offered = write(tmp_path / "v2", shards=2)
    (offered / files_not_in_the_index).write_bytes(b"x")
    compare(read_checkpoint(offered), read_checkpoint(running), offered)


@pytest.mark.parametrize(
    ("tensors", "config", "sentence"),
    [
        (
            {**TENSORS, "model.up.weight": ("BF16", [8, 4])},
            CONFIG,
            "in the tensors of {v2}: model.up.weight is [8, 4] BF16, the running model has [16, 4] BF16",
        ),
        (
            {**TENSORS, "model.up.weight": ("F32", [16, 4])},
            CONFIG,
            "model.up.weight is [16, 4] F32, the running model has [16, 4] BF16",
        ),
        (without("model.up.weight"), CONFIG, "{v2} lack model.up.weight, which the running model has"),
        (without("lm_head.weight"), CONFIG, "{v2} lack lm_head.weight"),
        (
            {**TENSORS, "model.bias": ("BF16", [4])},
            CONFIG,
            "{v2} hold model.bias, which the running model does not have",
        ),
        (TENSORS, {**CONFIG, "hidden_size": 8}, "{v2}/config.json has hidden_size: 8, the running model 4"),
        (TENSORS, {**CONFIG, "architectures": ["Other"]}, 'has architectures: ["Other"], the running model ["Tiny"]'),
        ({f"t{n}": ("BF16", [1]) for n in range(9)}, CONFIG, "which the running model has"),
    ],
)
def test_another_network_is_refused(
    tmp_path: Path, running: Path, tensors: dict[str, Any], config: dict[str, Any], sentence: str
) -> None:
    offered = write(tmp_path / "v2", tensors, config)
    assert sentence.format(v2=offered) in refusal(offered, running)


def test_only_some_of_many_are_named(tmp_path: Path, running: Path) -> None:
    offered = write(tmp_path / "v2", {**TENSORS, **{f"t{n}": ("BF16", [1]) for n in range(9)}})
    assert "hold t0, t1, t2 and 6 more, which" in refusal(offered, running)


def test_settings_that_only_one_writer_knows_are_no_difference(tmp_path: Path, running: Path) -> None:
    offered = write(tmp_path / "v2", config={**CONFIG, "mlp_bias": False, "transformers_version": "9"})
    compare(read_checkpoint(offered), read_checkpoint(running), offered)


@pytest.mark.parametrize("missing_in", ["v1", "v2"])
def test_a_tied_output_layer_is_an_alias(tmp_path: Path, missing_in: str) -> None:
    tied = {**CONFIG, "tie_word_embeddings": True}
    folders = {
        name: write(tmp_path / name, without("lm_head.weight") if name == missing_in else TENSORS, tied)
        for name in ("v1", "v2")
    }
    compare(read_checkpoint(folders["v2"]), read_checkpoint(folders["v1"]), folders["v2"])


def truncate(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])


def rewrite_header(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def whole_size() -> int:
    return len(safetensors(TENSORS))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda f: (f / "config.json").unlink(), "config.json does not exist"),
        (lambda f: (f / "config.json").write_text('{"hidden'), "config.json is not whole JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "config.json holds no JSON object"),
        (lambda f: (f / "model.safetensors").unlink(), "holds no *.safetensors file"),
        (lambda f: truncate(f, 0), "ends within its header (0 bytes): is it still being written?"),
        (lambda f: truncate(f, 5), "ends within its header (5 bytes)"),
        (lambda f: truncate(f, 60), "ends within its header (60 bytes)"),
        (lambda f: truncate(f, whole_size() - 1), "cut off at tensor lm_head.weight: is it still being written?"),
        (lambda f: truncate(f, whole_size() - 65), "cut off at tensor model.up.weight"),
        (lambda f: (f / "model.safetensors").write_bytes(bytes(4096)), "ends within its header"),
        (
            lambda f: rewrite_header(f, lambda h: h["lm_head.weight"].update(shape=[9, 4])),
            "tensor lm_head.weight in {f}/model.safetensors is [9, 4] BF16 but spans 64 bytes",
        ),
        (
            lambda f: rewrite_header(f, lambda h: h["lm_head.weight"].pop("dtype")),
            "says no type",
        ),
        (
            lambda f: (f / "extra.safetensors").write_bytes(safetensors(TENSORS)),
            "and in {f}/extra",
        ),
    ],
)
def test_a_broken_checkpoint_is_refused(
    tmp_path: Path, running: Path, damage: Callable[[Path], object], sentence: str
) -> None:
    offered = write(tmp_path / "v2")
    damage(offered)
    assert sentence.format(f=offered) in refusal(offered, running)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (
            lambda f: (f / "model-00002-of-00002.safetensors").unlink(),
            "model-00002-of-00002.safetensors does not exist: is it still being written?",
        ),
        (
            lambda f: (f / "model-00002-of-00002.safetensors").write_bytes(safetensors({"x": ("BF16", [1])})),
            "lacks model.up.weight where model.safetensors.index.json says it is",
        ),
        (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "has no weight_map"),
    ],
)
def test_an_index_must_be_true(tmp_path: Path, running: Path, damage: Callable[[Path], object], sentence: str) -> None:
    offered = write(tmp_path / "v2", shards=2)
    damage(offered)
    assert sentence in refusal(offered, running)


def test_a_folder_that_is_not_there(tmp_path: Path, running: Path) -> None:
    assert "is not a folder in the engine's pod" in refusal(tmp_path / "v9", running)
