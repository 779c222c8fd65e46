"""Where things live: one cache root outside the checkout, sub-folders keyed by version, sockets on a short path."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path


def cache_root() -> Path:
    """$SGLANG_ROLLOUT_CACHE, else sglang-rollout below $XDG_CACHE_HOME or ~/.cache."""
    chosen = os.environ.get("SGLANG_ROLLOUT_CACHE")
    if chosen:
        return Path(chosen).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "sglang-rollout"


@dataclass(frozen=True)
class Layout:
    """All paths of the cluster tools, derived from one cache root."""

    root: Path

    @classmethod
    def default(cls) -> Layout:
        return cls(cache_root())

    @property
    def id(self) -> str:
        """Six hex digits that tell this cache's daemon, bridge and chains from another's on the same machine."""
        return hashlib.sha256(str(self.root).encode()).hexdigest()[:6]

    @property
    def cluster(self) -> Path:
        """Everything that `down --purge` removes."""
        return self.root / "cluster"

    @property
    def bin(self) -> Path:
        return self.cluster / "bin"

    @property
    def logs(self) -> Path:
        return self.cluster / "logs"

    @property
    def images(self) -> Path:
        return self.cluster / "images"

    @property
    def docker(self) -> Path:
        """State of the private Docker daemon."""
        return self.cluster / "docker"

    @property
    def run(self) -> Path:
        """Sockets and runtime state: short, since a socket's path may have 107 bytes only."""
        return Path("/run") / f"sglang-rollout-{self.id}"

    @property
    def docker_socket(self) -> Path:
        return self.run / "docker.sock"

    def instance(self, name: str) -> Path:
        """State of the cluster called `name`."""
        return self.cluster / "instances" / name
