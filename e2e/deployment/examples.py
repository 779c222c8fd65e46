"""The example resources of the repository, as they are or with changes for a test."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "examples"
QUICKSTART = FOLDER / "quickstart-cpu.yaml"
TWO_NODES = FOLDER / "multi-node-cpu.yaml"


def load(path: Path, *, name: str | None = None, **spec: Any) -> dict[str, Any]:
    """The resource in a file, under another name, with `spec` merged in."""
    manifest: dict[str, Any] = yaml.safe_load(path.read_text())
    if name is not None:
        manifest["metadata"]["name"] = name
    manifest["spec"] = merged(manifest["spec"], spec)
    return manifest


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """JSON merge patch: objects are merged, None takes a field away, everything else is replaced."""
    result = copy.deepcopy(dict(base))
    for key, value in changes.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        else:
            result[key] = copy.deepcopy(value)
    return result
