"""How one engine gets its buckets from the trainer: by broadcast into a group of its own, or handed over on the same
GPUs. Needs torch."""

from __future__ import annotations

import threading
from typing import Any, Protocol

from .handover import Entries, collect
from .link import Link
from .live_weights import LiveWeights
from .session import Hello
from .transports import GLOO
from .transports.engine_group import EngineGroup, choose


class Giving(Protocol):
    """How one engine gets its buckets. What blocks is called in a thread."""

    transport: str
    group: str

    def details(self) -> dict[str, str]:
        """For the Welcome."""
        ...

    def join(self, seconds: float) -> None: ...
    def look_ahead(self, number: int) -> None:
        """Makes what prepare() will need, from any thread. Blocks. Raises WeightsChanged."""
        ...

    def prepare(self, number: int) -> tuple[dict[str, str], bytes]:
        """Details and blob of the Payload. Blocks. Raises WeightsChanged."""
        ...

    def give(self, number: int, seconds: float) -> None:
        """The bytes are with the engine when it returns. Blocks. Raises TransportBroken."""
        ...

    def taken(self, number: int) -> None: ...
    def abort(self) -> None: ...


class Broadcasting:
    """Direct: the engine's ranks receive."""

    def __init__(self, weights: LiveWeights, group: EngineGroup) -> None:
        self._weights = weights
        self.engine_group = group
        self.transport = group.transport
        self.group = group.name
        self._ready: tuple[int, Any] | None = None

    def details(self) -> dict[str, str]:
        return self.engine_group.details()

    def join(self, seconds: float) -> None:
        self.engine_group.join(seconds)

    def look_ahead(self, number: int) -> None:
        self._weights.flat(number)

    def prepare(self, number: int) -> tuple[dict[str, str], bytes]:
        flat = self._weights.flat(number)
        if self.transport == GLOO:
            flat = flat.cpu()
        elif not flat.is_cuda:
            flat = flat.cuda()
        self._ready = (number, flat)
        return {}, b""

    def give(self, number: int, seconds: float) -> None:
        assert self._ready is not None
        self.engine_group.broadcast(self._ready[1], seconds)

    def taken(self, number: int) -> None:
        self._ready = None

    def abort(self) -> None:
        self.engine_group.abort()


class EngineGroups:
    """Of one trainer: used again for an engine as long as both sides still have it."""

    def __init__(self, host: str = "") -> None:
        """`host`: the trainer's address as engines see it; "": the one that their agents came to."""
        self._host = host
        self._kept: dict[str, EngineGroup] = {}

    def open(self, weights: LiveWeights, link: Link, hello: Hello) -> Broadcasting:
        """Raises TransportUnable."""
        import torch

        kept = self._kept.pop(hello.receiver, None)
        engine = hello.offers.get("engine", {})
        transport = choose(
            engine.get("device", "cuda"), engine.get("transport", "Auto"), gpu_here=torch.cuda.is_available()
        )
        if kept is not None:
            same = kept.joined and (kept.transport, kept.world) == (transport, 1 + hello.ranks)
            if same and kept.name in hello.groups:
                return Broadcasting(weights, kept)
            kept.abort()
        return Broadcasting(weights, EngineGroup(self._host or link.own, transport, hello.ranks))

    def keep(self, hello: Hello, giving: Giving, good: bool) -> None:
        """good: nothing went wrong with it."""
        if good and isinstance(giving, Broadcasting) and giving.engine_group.joined:
            self._kept[hello.receiver] = giving.engine_group

    def close(self) -> None:
        for group in self._kept.values():
            group.abort()
        self._kept.clear()


class HandingOver:
    """Colocated: the engine opens what the trainer holds."""

    group = ""

    def __init__(self, weights: LiveWeights, ranks: int) -> None:
        self._weights = weights
        self._ranks = ranks
        self._lent: Any = None
        self._entries: dict[int, Entries] = {}
        self._lock = threading.Lock()
        self.transport = "CudaIpc"

    def details(self) -> dict[str, str]:
        return {}

    def join(self, seconds: float) -> None:
        raise AssertionError("there is no group to join")

    def look_ahead(self, number: int) -> None:
        self._entries_of(number)
        self._weights.flat(number)

    def prepare(self, number: int) -> tuple[dict[str, str], bytes]:
        import torch

        entries = self._entries_of(number)
        flat = self._lent = self._weights.flat(number)
        if flat.is_cuda:
            torch.cuda.synchronize(flat.device)
        # By value, one is for all ranks; whoever opens a handle needs one of its own.
        parts = [entries.entry(flat) for _ in range(self._ranks if flat.is_cuda else 1)]
        return {"sizes": ",".join(str(len(part)) for part in parts)}, b"".join(parts)

    def _entries_of(self, number: int) -> Entries:
        with self._lock:
            if number not in self._entries:
                self._entries[number] = Entries(self._weights.manifest.buckets[number])
            return self._entries[number]

    def give(self, number: int, seconds: float) -> None:
        """It went with the payload."""

    def taken(self, number: int) -> None:
        self._lent = None
        collect()

    def abort(self) -> None:
        self._lent = None
