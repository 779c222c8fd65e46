"""Where each tensor's bytes lie in a checkpoint folder of safetensors files, one or several with an index."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .comparison import some
from .manifest import ManifestRefused, Tensor, tensor_of
from .safetensors_header import INDEX, HeaderCutOff, read_header


class CheckpointUnusable(Exception):
    """The folder holds no whole checkpoint; the sentence says which file and why."""


@dataclass(frozen=True)
class StoredTensor:
    """`begin` is the offset of its first byte in the file."""

    tensor: Tensor
    path: Path
    begin: int


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """By name, in the order in which they lie on the disk. Raises CheckpointUnusable and OSError."""
    found: dict[str, StoredTensor] = {}
    wanted = _weight_map(folder)
    paths = sorted(set(wanted.values())) if wanted is not None else sorted(folder.glob("*.safetensors"))
    if not paths:
        raise CheckpointUnusable(f"{folder} holds no *.safetensors file: write the checkpoint as safetensors")
    for path in paths:
        for stored in _read_header(path):
            name = stored.tensor.name
            if name in found:
                raise CheckpointUnusable(f"tensor {name} is in {path} and in {found[name].path}")
            found[name] = stored
    if wanted is not None and (absent := sorted(n for n, p in wanted.items() if n not in found or found[n].path != p)):
        raise CheckpointUnusable(f"{folder} lacks {some(absent)} where {INDEX} says it is: is it still being written?")
    if not found:
        raise CheckpointUnusable(f"{folder} holds no tensors")
    return found


def _weight_map(folder: Path) -> dict[str, Path] | None:
    path = folder / INDEX
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise CheckpointUnusable(f"{path} is not whole JSON ({error}): is it still being written?") from error
    names = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(names, dict) or not all(isinstance(n, str) and "/" not in n for n in names.values()):
        raise CheckpointUnusable(f"{path} has no weight_map of tensor to file")
    return {str(tensor): folder / name for tensor, name in names.items()}


def _read_header(path: Path) -> list[StoredTensor]:
    try:
        header = read_header(path)
    except HeaderCutOff as error:
        raise CheckpointUnusable(str(error)) from error
    except FileNotFoundError:
        raise CheckpointUnusable(f"{path} does not exist: is it still being written?") from None
    except ValueError as error:
        raise CheckpointUnusable(f"{path} has no valid safetensors header: {error}") from error
    if not isinstance(header.content, dict):
        raise CheckpointUnusable(f"{path} has no valid safetensors header: it is no object")
    entries = ((name, entry) for name, entry in header.content.items() if name != "__metadata__")
    stored = [_stored(path, name, entry, header.base, header.size) for name, entry in entries]
    return sorted(stored, key=lambda one: one.begin)


def _stored(path: Path, name: str, entry: Any, base: int, size: int) -> StoredTensor:
    try:
        tensor = tensor_of(name, entry["dtype"], entry["shape"])
        begin, end = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointUnusable(f"{path} says no type, shape and place of tensor {name}: {error!r}") from error
    except ManifestRefused as error:
        raise CheckpointUnusable(f"{path}: {error}") from error
    if begin < 0 or end - begin != tensor.size:
        raise CheckpointUnusable(f"tensor {name} in {path} is {tensor} but spans {end - begin} bytes")
    if base + end > size:
        raise CheckpointUnusable(f"{path} is cut off at tensor {name}: is it still being written?")
    return StoredTensor(tensor, path, base + begin)
