"""The smallest valid resource, and a way to write variants of it."""

from __future__ import annotations

import copy
from typing import Any

Object = dict[str, Any]


def rollout(name: str = "fleet", **spec: Any) -> Object:
    """A minimal resource with `spec` laid over it (see `merged`)."""
    minimal: Object = {"model": {"path": "/models/qwen3-8b"}, "engine": {"image": "lmsysorg/sglang:v0.5.23"}}
    return {
        "apiVersion": "rollout.sglang.io/v1alpha1",
        "kind": "SGLangRollout",
        "metadata": {"name": name, "namespace": "default"},
        "spec": merged(minimal, spec),
    }


def merged(base: Object, patch: Object) -> Object:
    """`base` with `patch` laid over it: objects are merged, everything else is replaced, None removes."""
    result = copy.deepcopy(base)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        else:
            result[key] = copy.deepcopy(value)
    return result
