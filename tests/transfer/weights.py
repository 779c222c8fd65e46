"""Small sets of tensors and checkpoint folders of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from sglang_rollout.transfer.dtypes import DTYPES
from sglang_rollout.transfer.manifest import Tensor

Weights = Mapping[str, tuple[Tensor, bytes]]


def finite_bytes(tensor: Tensor, seed: int) -> bytes:
    """Random bytes without Inf or NaN: the top bit of every exponent is cleared."""
    raw = np.random.default_rng(seed).integers(0, 256, tensor.size, dtype=np.uint8)
    itemsize = DTYPES[tensor.dtype].itemsize
    raw.reshape(-1, itemsize)[:, -1] &= 0x3F
    return raw.tobytes()


def some_weights(seed: int = 0) -> dict[str, tuple[Tensor, bytes]]:
    tensors = [
        Tensor("embed.weight", "BF16", (16, 8)),
        Tensor("layers.0.norm.weight", "F32", (8,)),
        Tensor("layers.0.mlp.weight", "BF16", (8, 24)),
        Tensor("layers.0.scale", "F8_E4M3", (16,)),
        Tensor("step", "I64", ()),
    ]
    return {tensor.name: (tensor, finite_bytes(tensor, seed + n)) for n, tensor in enumerate(tensors)}


def write_checkpoint(folder: Path, weights: Weights, *, shards: int = 1) -> Path:
    """As safetensors, with an index when there are several files."""
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[dict[str, tuple[Tensor, bytes]]] = [{} for _ in range(shards)]
    for number, (name, held) in enumerate(weights.items()):
        parts[number % shards][name] = held
    where: dict[str, str] = {}
    for number, part in enumerate(parts):
        file = "model.safetensors" if shards == 1 else f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        (folder / file).write_bytes(_file(part))
        where |= dict.fromkeys(part, file)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def _file(part: Weights) -> bytes:
    header: dict[str, object] = {}
    body = b""
    for name, (tensor, data) in part.items():
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body
