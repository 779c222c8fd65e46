"""Leader election by a coordination.k8s.io Lease. Its count of transitions is the term that fences orders to pods:
they refuse a lower one, so an operator that has lost the lease without noticing can do no harm."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from .kinds import LEASE, Object
from .kube import KubeClient
from .kube_errors import Conflict, KubeError, NotFound

log = logging.getLogger(__name__)

LEASE_SECONDS = 15.0
RENEW_SECONDS = 10.0  # a holder that could not renew for so long stops; shorter than LEASE_SECONDS
RETRY_SECONDS = 2.0
CALL_SECONDS = 5.0
# The field is an int32. Pods run images of tenants: none of them may drive the term of all fleets up to its end.
HIGHEST_ASKED_TERM = 2**30


def boottime() -> float:
    """Seconds that go on while the machine sleeps, unlike time.monotonic()'s on Linux."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class LeaseLost(Exception):
    """Somebody else holds the lease, or it could not be renewed in time."""


@dataclass(frozen=True)
class _Seen:
    """What of the Lease changes when its holder lives, and when we first saw it so."""

    holder: str
    renewed: str
    at: float


class LeaderLease:
    """Takes the lease, keeps it and gives it back. `leading` is true only while nobody else can hold it."""

    def __init__(
        self,
        kube: KubeClient,
        namespace: str,
        name: str,
        identity: str,
        *,
        clock: Callable[[], float] = boottime,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.identity = identity
        self.term = 0
        self._kube = kube
        self._namespace = namespace
        self._name = name
        self._clock = clock
        self._sleep = sleep
        self._now = now
        self._held: Object | None = None
        self._valid_until = 0.0
        self._seen: _Seen | None = None
        self._least_term = 0
        self._hurry = asyncio.Event()

    @property
    def leading(self) -> bool:
        """Once false after it was true, it stays false: nobody has to come back from not leading."""
        if self._held is not None and self._clock() >= self._valid_until:
            self._held = None
        return self._held is not None

    def need_term_above(self, term: int) -> None:
        """Pods have obeyed `term` (of a Lease that was deleted since, or restored from a backup): the next renewal
        goes above it. A holder that was deposed cannot: its renewal fails. A term that no Lease can have come to is
        not believed."""
        if term >= HIGHEST_ASKED_TERM:
            log.warning("a pod asks for a lease term above %d, which is not believed", term)
            return
        if term >= self.term and term >= self._least_term:
            self._least_term = term + 1
            self._hurry.set()

    async def acquire(self) -> None:
        """Returns when the lease is ours."""
        while not await self._try(self._take):
            await self._sleep(RETRY_SECONDS * random.uniform(0.8, 1.2))  # noqa: S311 jitter
        log.info("leading as %s, term %d", self.identity, self.term)

    async def keep(self) -> None:
        """Renews until that fails: raises LeaseLost."""
        while self.leading:
            await self._wait(RETRY_SECONDS)
            await self._try(self._renew)
        raise LeaseLost(f"{self.identity} no longer holds the lease {self._namespace}/{self._name}")

    async def release(self) -> None:
        """Lets a standby take over at once. A failure is logged: the lease then runs out by itself."""
        held, self._held = self._held, None
        if held is None:
            return
        spec = {**held["spec"], "holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": self._timestamp()}
        try:
            async with asyncio.timeout(CALL_SECONDS):
                await self._kube.replace(LEASE, {**held, "spec": spec}, CALL_SECONDS)
        except (KubeError, TimeoutError) as error:
            log.warning("could not give back the lease: %s", error)

    async def _wait(self, seconds: float) -> None:
        """As sleep, but ends early when a higher term is needed."""
        sleeping = asyncio.ensure_future(self._sleep(seconds))
        hurry = asyncio.ensure_future(self._hurry.wait())
        try:
            await asyncio.wait({sleeping, hurry}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sleeping.cancel()
            hurry.cancel()
        self._hurry.clear()

    async def _try(self, step: Callable[[], Awaitable[bool]]) -> bool:
        try:
            async with asyncio.timeout(CALL_SECONDS):
                return await step()
        except (KubeError, TimeoutError) as error:
            log.warning("lease %s/%s: %s", self._namespace, self._name, error or "no answer in time")
            return False

    async def _take(self) -> bool:
        started = self._clock()
        try:
            lease = await self._kube.get(LEASE, self._namespace, self._name)
        except NotFound:
            body: Object = {
                "apiVersion": LEASE.api_version,
                "kind": LEASE.kind,
                "metadata": {"name": self._name, "namespace": self._namespace},
                "spec": self._spec({}, max(1, self._least_term)),
            }
            try:
                self._hold(await self._kube.create(LEASE, body), started)
            except Conflict:
                return False
            return True
        spec = lease.get("spec") or {}
        if not self._expired(spec):
            return False
        term = max(int(spec.get("leaseTransitions") or 0) + 1, self._least_term)
        return await self._write(lease, term, started)

    async def _renew(self) -> bool:
        held = self._held
        if held is None or not self.leading:
            return False
        started = self._clock()
        if await self._write(held, max(self.term, self._least_term), started):
            return True
        # Changed by somebody: by another holder, or by a person who touched it.
        try:
            live = await self._kube.get(LEASE, self._namespace, self._name)
        except NotFound:
            live = {"spec": {}}
        if (live.get("spec") or {}).get("holderIdentity") != self.identity:
            self._held = None
            return False
        return await self._write(live, max(self.term, self._least_term), started)

    async def _write(self, lease: Object, term: int, started: float) -> bool:
        """One optimistic write; False when the lease was changed since it was read."""
        try:
            written = await self._kube.replace(LEASE, {**lease, "spec": self._spec(lease.get("spec") or {}, term)})
        except (Conflict, NotFound):
            return False
        if self.term and not self.leading:
            return False  # the answer came too late: others may have been told that we do not lead
        self._hold(written, started)
        return True

    def _hold(self, lease: Object, started: float) -> None:
        self._held = lease
        self._valid_until = started + RENEW_SECONDS  # from before the call: the server's time of renewal is later
        self.term = int(lease["spec"]["leaseTransitions"])

    def _spec(self, before: Object, term: int) -> Object:
        now = self._timestamp()
        mine = before.get("holderIdentity") == self.identity
        return {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": int(LEASE_SECONDS),
            "acquireTime": before.get("acquireTime") if mine else now,
            "renewTime": now,
            "leaseTransitions": term,
        }

    def _expired(self, spec: Object) -> bool:
        """Whether the holder has not renewed for the lease's duration, by our own clock since we first saw it so:
        clocks of machines differ."""
        holder, renewed = spec.get("holderIdentity") or "", spec.get("renewTime") or ""
        if holder in ("", self.identity):  # ours: a write whose answer never came
            return True
        if self._seen is None or (self._seen.holder, self._seen.renewed) != (holder, renewed):
            self._seen = _Seen(holder, renewed, self._clock())
        return self._clock() - self._seen.at >= float(spec.get("leaseDurationSeconds") or LEASE_SECONDS)

    def _timestamp(self) -> str:
        return self._now().astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
