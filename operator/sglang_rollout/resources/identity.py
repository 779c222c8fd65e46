"""Who a child is and whom it belongs to: the metadata that all kinds have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..api import API_VERSION, KIND, SGLangRollout

Manifest = dict[str, Any]


def owner_reference(rollout: SGLangRollout) -> Manifest:
    """A controlling owner: the garbage collector removes the child with the resource, the operator up or not."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": rollout.metadata.name,
        "uid": rollout.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def child(
    rollout: SGLangRollout,
    api_version: str,
    kind: str,
    name: str,
    labels: Mapping[str, str],
    *,
    annotations: Mapping[str, str] | None = None,
    **body: Any,
) -> Manifest:
    """A whole manifest in the resource's namespace; body: what stands beside metadata (spec, data, ...)."""
    metadata: Manifest = {
        "name": name,
        "namespace": rollout.metadata.namespace,
        "labels": dict(labels),
        "ownerReferences": [owner_reference(rollout)],
    }
    if annotations:
        metadata["annotations"] = dict(annotations)
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **body}
