"""The trainer as rank 0 of one engine's own group (SGLang's /init_weights_update_group): one group for each engine, so
that an engine that dies spoils nothing but its own."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

from . import GLOO, NCCL, Meeting, TransportBroken, TransportUnable

RENDEZVOUS_SECONDS = 60.0
BACKENDS = {GLOO: "gloo", NCCL: "nccl"}
# torch keeps the keys of each backend of a group under the device that it is for, the first of its devices.
_KEYS = {GLOO: "cpu/", NCCL: "cuda/"}

# SGLang turns these off, and both sides of a communicator must agree. NCCL reads them once: a trainer that has used it
# before, for itself, must have set them itself.
_AS_SGLANG = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")


class Broadcaster(Protocol):
    """A process group that is ours alone."""

    def broadcast(self, tensors: Any, seconds: float) -> None: ...
    def abort(self) -> None: ...


class EngineGroup:
    """From its making on there is somebody for the engine to meet."""

    def __init__(self, host: str, transport: str, ranks: int) -> None:
        """`host`: this machine's address as the engine sees it. `ranks` of the engine. Raises TransportUnable."""
        from torch.distributed import TCPStore

        if transport == NCCL:
            for name in _AS_SGLANG:
                os.environ.setdefault(name, "0")
        self.transport = transport
        self.name = f"sglang-rollout-{secrets.token_hex(6)}"
        self.world = 1 + ranks
        self._host = host
        self._group: Broadcaster | None = None
        self._aborted = False
        try:
            self._store: Any = TCPStore(
                host, 0, None, True, timedelta(seconds=RENDEZVOUS_SECONDS), wait_for_workers=False
            )
        except RuntimeError as error:
            raise TransportUnable(f"no rendezvous at {host}: {str(error).splitlines()[0][:200]}") from error

    @property
    def joined(self) -> bool:
        return self._group is not None and not self._aborted

    def details(self) -> dict[str, str]:
        return {"port": str(self._store.port), "backend": BACKENDS[self.transport]}

    def join(self, seconds: float) -> None:
        """Returns when the engine's ranks are there. Blocks. Raises TransportBroken."""
        from torch.distributed import PrefixStore

        # As the engine builds it: torch.distributed adds the group's name once, its rendezvous once before.
        store = PrefixStore(f"{self.name}/", PrefixStore(self.name, self._store))
        meeting = Meeting(_KEYS[self.transport], self._host, self.world, seconds)
        try:
            self._group = _kind(self.transport)(store, meeting, 0, seconds)
        except RuntimeError as error:
            raise TransportBroken(str(error).splitlines()[0][:200]) from error
        if self._aborted:
            self._group.abort()

    def broadcast(self, flat: Any, seconds: float) -> None:
        """Blocks. Raises TransportBroken."""
        if self._group is None:
            raise TransportBroken("the group was never joined")
        self._group.broadcast([flat], seconds)

    def abort(self) -> None:
        """From any thread. Never blocks."""
        self._aborted = True
        if self._group is not None:
            self._group.abort()


def _kind(transport: str) -> Callable[..., Broadcaster]:
    if transport == NCCL:
        from .nccl import NcclGroup

        return partial(NcclGroup, rehearse=False)  # SGLang's ranks do not
    from .gloo import GlooGroup

    return GlooGroup


def choose(device: str, wanted: str, *, gpu_here: bool) -> str:
    """`device` of the engine, `wanted` as in api.weights.DistributedSource. Raises TransportUnable."""
    if wanted not in ("Auto", *BACKENDS):
        raise TransportUnable(f"an engine cannot take weights by {wanted} itself: use transport Auto, NCCL or Gloo")
    on_gpu = device != "cpu"
    if wanted == NCCL and not (on_gpu and gpu_here):
        raise TransportUnable(f"NCCL needs a GPU on both sides: the engine runs on {device}, use transport Auto")
    return GLOO if wanted == GLOO or not (on_gpu and gpu_here) else NCCL
