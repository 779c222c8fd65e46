"""Reads a checkpoint folder's safetensors headers and says, in sentences, why an engine that runs another checkpoint
must not load it. Bytes of tensors are never read: a wrong value passes, a missing one does not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from sglang_rollout.transfer.comparison import some
from sglang_rollout.transfer.safetensors_header import INDEX, HeaderCutOff, read_header

_DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64, "F4": 4, "F6_E2M3": 6,
    "F6_E3M2": 6, "C64": 64,
}  # fmt: skip

# What the running engine has built into its modules: update_weights_from_disk does not read config.json again.
# A field that only one of the two has is no difference: writers of other releases add defaults.
_ARCHITECTURE_FIELDS = """
    architectures model_type hidden_size intermediate_size moe_intermediate_size num_hidden_layers
    num_attention_heads num_key_value_heads head_dim vocab_size hidden_act tie_word_embeddings rms_norm_eps
    layer_norm_eps rope_theta rope_scaling rope_parameters partial_rotary_factor sliding_window use_sliding_window
    max_window_layers layer_types attention_bias mlp_bias num_experts num_local_experts n_routed_experts
    n_shared_experts num_experts_per_tok norm_topk_prob decoder_sparse_step mlp_only_layers first_k_dense_replace
    q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim routed_scaling_factor scoring_func
    topk_group n_group quantization_config
"""
_ARCHITECTURE = frozenset(_ARCHITECTURE_FIELDS.split())


class CheckpointRefused(Exception):
    """The checkpoint is wrong in itself or for the running engine; the sentence says which tensor and why."""


@dataclass(frozen=True)
class Tensor:
    dtype: str  # as safetensors writes it, "BF16"
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{list(self.shape)} {self.dtype}"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds: tensors by their names in it, and the fields of config.json that the network is
    built from."""

    tensors: dict[str, Tensor]
    architecture: dict[str, Any]


def read_manifest(folder: Path) -> Manifest:
    """Raises CheckpointRefused for one that no engine could load, OSError when it cannot be read now."""
    if not folder.is_dir():
        raise CheckpointRefused(f"{folder} is not a folder in the engine's pod: put the checkpoint on the model volume")
    config = _read_json(folder / "config.json")
    tensors: dict[str, Tensor] = {}
    for path, wanted in _files(folder).items():
        header = _read_header(path)
        if wanted is not None and (absent := sorted(wanted - header.keys())):
            raise CheckpointRefused(f"{path} lacks {some(absent)}, which {INDEX} says it holds")
        for name, tensor in header.items():
            if name in tensors:
                raise CheckpointRefused(f"tensor {name} is in {path} and in another file of {folder}")
            tensors[name] = tensor
    return Manifest(tensors, architecture={key: config[key] for key in sorted(config) if key in _ARCHITECTURE})


def compare(offered: Manifest, running: Manifest, folder: Path) -> None:
    """Raises CheckpointRefused if an engine that runs `running` must not load `offered`, which is in `folder`."""
    # With tied embeddings the output layer is an alias that a checkpoint may hold or not.
    tied = running.architecture.get("tie_word_embeddings") is True
    aliases = {"lm_head.weight"} if tied else set()
    differing = [
        f"{name} is {offered.tensors[name]}, the running model has {running.tensors[name]}"
        for name in sorted(offered.tensors.keys() & running.tensors.keys())
        if offered.tensors[name] != running.tensors[name]
    ]
    if differing:
        raise CheckpointRefused(f"wrong tensors in {folder}: {some(differing, '; ')}")
    if absent := sorted(running.tensors.keys() - offered.tensors.keys() - aliases):
        raise CheckpointRefused(f"{folder} lacks {some(absent)}, which the running model has")
    if unknown := sorted(offered.tensors.keys() - running.tensors.keys() - aliases):
        raise CheckpointRefused(f"{folder} holds {some(unknown)}, which the running model does not have")
    for key in sorted(offered.architecture.keys() & running.architecture.keys()):
        if offered.architecture[key] != running.architecture[key]:
            raise CheckpointRefused(
                f"{folder}/config.json has {key}: {json.dumps(offered.architecture[key])}, the running model "
                f"{json.dumps(running.architecture[key])}"
            )


def _files(folder: Path) -> dict[Path, set[str] | None]:
    """The safetensors files to load, each with the names that the index says it holds (None without an index)."""
    index_path = folder / INDEX
    if not index_path.exists():
        found = sorted(folder.glob("*.safetensors"))
        if not found:
            raise CheckpointRefused(f"{folder} holds no *.safetensors file: write the checkpoint as safetensors")
        return dict.fromkeys(found)
    weight_map = _read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointRefused(f"{index_path} has no weight_map of tensor to file")
    files: dict[Path, set[str] | None] = {}
    for tensor, name in weight_map.items():
        names = files.setdefault(folder / name, set())
        assert names is not None
        names.add(tensor)
    if missing := sorted(path.name for path in files if not path.is_file()):
        raise CheckpointRefused(f"{folder} lacks {some(missing)}, which {INDEX} names: is it still being written?")
    return files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointRefused(f"{path} does not exist") from None
    except ValueError as error:
        raise CheckpointRefused(f"{path} is not whole JSON ({error}): is it still being written?") from error
    if not isinstance(value, dict):
        raise CheckpointRefused(f"{path} holds no JSON object")
    return value


def _read_header(path: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file, whose size must be what its header says."""
    try:
        header = read_header(path)
        tensors = {name: entry for name, entry in header.content.items() if name != "__metadata__"}
        parsed = {name: Tensor(entry["dtype"], tuple(entry["shape"])) for name, entry in tensors.items()}
        spans = {
            name: (int(entry["data_offsets"][0]), int(entry["data_offsets"][1])) for name, entry in tensors.items()
        }
    except HeaderCutOff as error:
        raise CheckpointRefused(str(error)) from error
    except FileNotFoundError:
        raise CheckpointRefused(f"{path} does not exist") from None
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise CheckpointRefused(f"{path} has no valid safetensors header: {type(error).__name__}: {error}") from error
    _check_spans(path, parsed, spans, header.size - header.base)
    return parsed


def _check_spans(path: Path, tensors: Mapping[str, Tensor], spans: Mapping[str, tuple[int, int]], held: int) -> None:
    for name, (begin, end) in spans.items():
        bits = _DTYPE_BITS.get(tensors[name].dtype)
        if begin < 0 or (bits is not None and (end - begin) * 8 != prod(tensors[name].shape) * bits):
            raise CheckpointRefused(f"tensor {name} in {path} is {tensors[name]} but spans {end - begin} bytes")
    needed = max((end for begin, end in spans.values()), default=0)
    if needed != held:
        cut = sorted((span, name) for name, span in spans.items() if span[1] > held)
        at = f", cut off at tensor {cut[0][1]}" if cut else ""
        raise CheckpointRefused(
            f"{path} holds {held} bytes of tensors and its header says {needed}{at}: is it still being written?"
        )
