"""What the demo runs with: the quickstart example on the local cluster, or the caller's resource on theirs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import ClusterError
from e2e.deployment import examples
from e2e.sglang_cpu import models

NAMESPACE = "rollout-demo"
NEW_VERSION = "2"


@dataclass(frozen=True)
class Settings:
    """resource: the file to apply; weights_path: where the engines' pods find the weights of version "2"."""

    resource: Path
    weights_path: str
    current: bool

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """CLUSTER=current needs RESOURCE (a SGLangRollout that runs there) and WEIGHTS_PATH. Raises ClusterError."""
        current = environ.get("CLUSTER") == "current"
        resource, path = environ.get("RESOURCE"), environ.get("WEIGHTS_PATH")
        if current and not (resource and path):
            raise ClusterError(
                "CLUSTER=current needs RESOURCE=file.yaml, a SGLangRollout whose image and model that cluster has "
                "(examples/gpu-8b.yaml is a start), and WEIGHTS_PATH=/models/..., other weights of the same shape"
            )
        return cls(
            resource=Path(resource) if resource else examples.QUICKSTART,
            weights_path=path or f"{models.MOUNT_PATH}/qwen3-v2",
            current=current,
        )
