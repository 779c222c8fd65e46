"""The cluster's token issuer and its public keys, which the pods of every fleet need to know the operator by."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from ..protocol.fleet import Trust, audience
from .kube import KubeClient
from .kube_errors import KubeError

log = logging.getLogger(__name__)

REFRESH_SECONDS = 600.0
RETRY_SECONDS = 5.0


class ClusterKeys:
    """Read again every ten minutes: keys rotate. on_change: all fleets must be told."""

    def __init__(self, kube: KubeClient, caller: str, on_change: Callable[[], None]) -> None:
        self._kube = kube
        self._caller = caller
        self._on_change = on_change
        self._issuer = ""
        self._jwks: dict[str, Any] = {}

    def trust(self, resource_uid: str) -> Trust:
        return Trust(audience(resource_uid), self._issuer, [self._caller], self._jwks)

    async def load(self) -> None:
        """Raises KubeError."""
        issuer = str((await self._kube.get_path("/.well-known/openid-configuration"))["issuer"])
        jwks = await self._kube.get_path("/openid/v1/jwks")
        changed = (issuer, jwks) != (self._issuer, self._jwks)
        self._issuer, self._jwks = issuer, jwks
        if changed:
            self._on_change()

    async def load_until_there(self) -> None:
        while True:
            try:
                return await self.load()
            except KubeError as error:
                log.warning("the cluster's token keys cannot be read: %s; again in %.0f s", error, RETRY_SECONDS)
                await asyncio.sleep(RETRY_SECONDS)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            try:
                await self.load()
            except KubeError as error:
                log.warning("the cluster's token keys cannot be read again: %s; the known ones stay", error)
