"""Tiny checkpoints, written by hand as safetensors, whole and broken."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {"architectures": ["Tiny"], "hidden_size": 4, "tie_word_embeddings": False}
TENSORS: dict[str, tuple[str, list[int]]] = {
    "model.embed.weight": ("BF16", [8, 4]),
    "model.up.weight": ("BF16", [16, 4]),
    "lm_head.weight": ("BF16", [8, 4]),
}
BYTES = {"BF16": 2, "F32": 4}


def safetensors(tensors: Mapping[str, tuple[str, list[int]]], fill: int = 0) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        size = BYTES[dtype]
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes([fill]) * offset


def write(
    folder: Path,
    tensors: Mapping[str, tuple[str, list[int]]] = TENSORS,
    config: Mapping[str, Any] = CONFIG,
    shards: int = 1,
    fill: int = 0,
) -> Path:
    """A checkpoint of one file, or of several with an index. fill: every byte of its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors(tensors, fill))
        return folder
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {tensor: tensors[tensor] for tensor in list(tensors)[shard::shards]}
        (folder / name).write_bytes(safetensors(part, fill))
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder
