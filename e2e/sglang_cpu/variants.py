"""Other models made from the dense ones: element types mixed in one checkpoint, and a mixture of experts."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

EXPERTS = 4
_NUMBERS: dict[str, np.dtype[Any]] = {"BF16": np.dtype("<u2"), "F32": np.dtype("<f4")}


def widen_norms(folder: Path) -> None:
    """The norms become float32, the rest stays bfloat16."""
    tensors = _read(folder / "model.safetensors")
    for name, (_, values) in tensors.items():
        if name.endswith("norm.weight"):
            tensors[name] = ("F32", (values.astype("<u4") << 16).view("<f4"))
    _write(folder / "model.safetensors", tensors)


def split_into_experts(folder: Path) -> None:
    """Qwen3-MoE: each layer's MLP becomes EXPERTS that differ by how their rows are turned, and a gate of some rows of
    the up projection."""
    tensors = _read(folder / "model.safetensors")
    split: dict[str, tuple[str, Any]] = {}
    for name, (dtype, values) in tensors.items():
        before, found, part = name.partition(".mlp.")
        if not found:
            split[name] = (dtype, values)
            continue
        for expert in range(EXPERTS):
            split[f"{before}.mlp.experts.{expert}.{part}"] = (dtype, np.roll(values, expert, axis=0))
        if part == "up_proj.weight":
            split[f"{before}.mlp.gate.weight"] = (dtype, values[:EXPERTS])
    _write(folder / "model.safetensors", split)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": config["intermediate_size"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.0,
        "output_router_logits": False,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _read(path: Path) -> dict[str, tuple[str, Any]]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    found: dict[str, tuple[str, Any]] = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            values = np.frombuffer(data[begin:end], _NUMBERS[entry["dtype"]]).reshape(entry["shape"])
            found[name] = (entry["dtype"], values)
    return found


def _write(path: Path, tensors: dict[str, tuple[str, Any]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts: list[bytes] = []
    offset = 0
    # As the format's own writer: the largest elements first.
    for name, (dtype, values) in sorted(tensors.items(), key=lambda item: (-_NUMBERS[item[1][0]].itemsize, item[0])):
        parts.append(np.ascontiguousarray(values).tobytes())
        header[name] = {
            "dtype": dtype,
            "shape": list(values.shape),
            "data_offsets": [offset, offset + len(parts[-1])],
        }
        offset += len(parts[-1])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))
