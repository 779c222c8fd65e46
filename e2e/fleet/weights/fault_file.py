"""The file through which a test hurts a running agent at a named step (sglang_rollout.agent.fault_points)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from e2e.cluster import Cluster
from e2e.deployment.errors import DeploymentError
from sglang_rollout.api.names import CONTAINER_AGENT, engine_pod_name
from sglang_rollout.protocol.pod import RUN_DIR

FAULTS = f"{RUN_DIR}/faults"


@dataclass(frozen=True)
class FaultFile:
    """Of the agent beside engine `index`; written in the agent's container, which is there when the engine is not."""

    cluster: Cluster
    namespace: str
    fleet: str
    index: int

    async def arm(self, point: str, kind: str) -> None:
        """The next time that the agent comes to `point`."""
        await self._shell(f"rm -f {FAULTS}.held; printf %s '{point}={kind}' > {FAULTS}.arm; mv {FAULTS}.arm {FAULTS}")

    async def clear(self) -> None:
        """Nothing is armed, and what holds goes on."""
        await self._shell(f"rm -f {FAULTS}")

    async def fired(self) -> bool:
        """Whether what was armed has acted: it is taken out of the file."""
        return not await self._shell(f"cat {FAULTS} 2>/dev/null || true")

    async def held(self, *, timeout: float = 60) -> None:
        """Until the agent holds. Raises DeploymentError."""
        deadline = time.monotonic() + timeout
        while not await self._shell(f"cat {FAULTS}.held 2>/dev/null || true"):
            if time.monotonic() > deadline:
                raise DeploymentError(f"the agent of engine {self.index} does not come to its point in {timeout:.0f} s")
            await asyncio.sleep(0.1)

    @contextlib.asynccontextmanager
    async def holding(self, point: str) -> AsyncIterator[None]:
        """Arm a hold for the time of the block."""
        await self.arm(point, "hold")
        try:
            yield
        finally:
            await self.clear()

    async def _shell(self, script: str) -> str:
        pod = engine_pod_name(self.fleet, self.index, 0)
        words = ("-n", self.namespace, "exec", pod, "-c", CONTAINER_AGENT, "--", "sh", "-c", script)
        return (await asyncio.to_thread(self.cluster.kubectl, *words, timeout=30)).strip()
