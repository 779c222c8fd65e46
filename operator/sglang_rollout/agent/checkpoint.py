"""What a checkpoint folder holds, by the headers of its files, and why an engine that runs another one must not load
it, in sentences. Values of tensors are not read here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from sglang_rollout.transfer.checkpoint_files import CheckpointUnusable, stored_tensors
from sglang_rollout.transfer.comparison import differences
from sglang_rollout.transfer.manifest import Tensor

TIED_NAME = "lm_head.weight"

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
class Checkpoint:
    """tensors: as they lie in the files. architecture: the fields of config.json that the network is built from."""

    tensors: list[Tensor] = field(default_factory=list)
    architecture: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def by_name(self) -> Mapping[str, Tensor]:
        return {tensor.name: tensor for tensor in self.tensors}

    @property
    def tied_names(self) -> frozenset[str]:
        """With tied embeddings the output layer is an alias that a checkpoint may hold or not."""
        return frozenset({TIED_NAME}) if self.architecture.get("tie_word_embeddings") is True else frozenset()


def read_checkpoint(folder: Path) -> Checkpoint:
    """Raises CheckpointRefused for one that no engine could load, OSError when it cannot be read now."""
    if not folder.is_dir():
        raise CheckpointRefused(f"{folder} is not a folder in the engine's pod: put the checkpoint on the model volume")
    config = _read_json(folder / "config.json")
    try:
        stored = stored_tensors(folder)
    except CheckpointUnusable as error:
        raise CheckpointRefused(str(error)) from error
    architecture = {key: config[key] for key in sorted(config) if key in _ARCHITECTURE}
    return Checkpoint([one.tensor for one in stored.values()], architecture)


def compare(offered: Checkpoint, running: Checkpoint, folder: Path) -> None:
    """Raises CheckpointRefused if an engine that runs `running` must not load `offered`, which is in `folder`."""
    wrong = differences(
        offered.by_name, running.by_name, optional=running.tied_names, subject=f"the tensors of {folder}"
    )
    if wrong:
        raise CheckpointRefused("; ".join(wrong))
    for key in sorted(offered.architecture.keys() & running.architecture.keys()):
        if offered.architecture[key] != running.architecture[key]:
            raise CheckpointRefused(
                f"{folder}/config.json has {key}: {json.dumps(offered.architecture[key])}, the running model "
                f"{json.dumps(running.architecture[key])}"
            )


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
