"""Tokens that the operator shows to the pods of a fleet: of its own ServiceAccount, minted by TokenRequest for one
fleet only, kept until half of their life is over."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from .kinds import SERVICE_ACCOUNT, Object
from .kube import KubeClient
from .kube_errors import KubeError

log = logging.getLogger(__name__)

LIFETIME_SECONDS = 600  # the least that TokenRequest grants
MARGIN_SECONDS = 30.0  # a token is not used in its last moments: clocks differ
RETRY_SECONDS = 10.0


@dataclass(frozen=True)
class _Minted:
    token: str
    renew_at: float
    good_until: float


class FleetTokens:
    """token(audience) is cheap but for the first call and once in half a lifetime; concurrent calls for one audience
    share one request. Raises KubeError when there is no valid token and none can be had."""

    def __init__(
        self, kube: KubeClient, namespace: str, service_account: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._kube = kube
        self._namespace = namespace
        self._service_account = service_account
        self._clock = clock
        self._minted: dict[str, _Minted] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def token(self, audience: str) -> str:
        minted = self._fresh(audience)
        if minted is None:
            async with self._locks.setdefault(audience, asyncio.Lock()):
                minted = self._fresh(audience) or await self._renew(audience)
        return minted.token

    def discard(self, audience: str, token: str) -> None:
        """A pod has refused this token: the next call gets a new one."""
        minted = self._minted.get(audience)
        if minted is not None and minted.token == token:
            del self._minted[audience]

    def forget(self, audience: str) -> None:
        """The fleet is gone."""
        self._minted.pop(audience, None)
        self._locks.pop(audience, None)

    def _fresh(self, audience: str) -> _Minted | None:
        minted = self._minted.get(audience)
        return minted if minted is not None and self._clock() < minted.renew_at else None

    async def _renew(self, audience: str) -> _Minted:
        """A new token, or the old one while it is good and none can be had."""
        try:
            return await self._mint(audience)
        except KubeError as error:
            old = self._minted.get(audience)
            if old is None or self._clock() >= old.good_until:
                raise
            log.warning("no new token for %s: %s; the old one is still good", audience, error)
            kept = self._minted[audience] = replace(old, renew_at=self._clock() + RETRY_SECONDS)
            return kept

    async def _mint(self, audience: str) -> _Minted:
        started = self._clock()
        request: Object = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "metadata": {"namespace": self._namespace, "name": self._service_account},
            "spec": {"audiences": [audience], "expirationSeconds": LIFETIME_SECONDS},
        }
        answer = await self._kube.create(SERVICE_ACCOUNT, request, "token", self._service_account)
        seconds = float(answer["spec"].get("expirationSeconds") or LIFETIME_SECONDS)
        minted = self._minted[audience] = _Minted(
            answer["status"]["token"], started + seconds / 2, started + seconds - MARGIN_SECONDS
        )
        return minted
