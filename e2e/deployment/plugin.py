"""`kubectl sgrollout` as a person runs it: the program of this checkout, in a process of its own."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from typing import Any

from e2e.cluster import Cluster
from e2e.cluster.process import run

CALL_SECONDS = 300.0


@dataclass(frozen=True)
class Said:
    """How one call ended. code: its exit code; out, err: what it printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Of a call with `-o json`."""
        return json.loads(self.out)


@dataclass(frozen=True)
class Plugin:
    """Calls in one namespace, as the administrator of the cluster."""

    cluster: Cluster
    namespace: str

    async def __call__(self, *words: str, timeout: float = CALL_SECONDS) -> Said:
        """Run to the end, whatever its exit code. Raises ClusterError when it takes longer than `timeout` seconds."""
        argv = [sys.executable, "-m", "sglang_rollout.cli", *words]
        argv += ["--namespace", self.namespace, "--kubeconfig", str(self.cluster.kubeconfig)]
        done = await asyncio.to_thread(run, argv, timeout=timeout, check=False)
        return Said(done.returncode, done.stdout, done.stderr)
