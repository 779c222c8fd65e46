"""How the bytes of a version come to an engine: by which way, and from whom."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable

from ..api.status import CommittedVersion, TransferStatus, WeightTransaction
from ..api.weights import Sender, WeightSource
from ..protocol.pod import address_of
from ..protocol.weights import Source, SourceKind
from .engines import EngineView

PEERS_MAX = 8  # that an order names: one will do, and the others are for when it dies
# A trainer gives these to the engine itself, through rank 0's agent alone.
INTO_THE_ENGINE = ("Direct", "Colocated")


class Keepers:
    """Who holds which weights in its stage, found out once a plan: many engines may ask."""

    def __init__(self, engines: Iterable[EngineView]) -> None:
        self._engines = engines
        self._by_root: dict[str, list[tuple[int, str]]] = {}

    def peers(self, engine: EngineView, root: str) -> list[str]:
        """host:port of agents that `engine` can take these weights from: its own pods first, then those of others from
        its index on, so that many engines do not all ask the same one. Empty when all of its pods have them."""
        if not root or engine.holds(root):
            return []
        if root not in self._by_root:
            ordered = sorted(self._engines, key=lambda one: one.index)
            self._by_root[root] = [(one.index, address) for one in ordered for address in one.keeps(root)]
        found = self._by_root[root]
        first = bisect_left(found, (engine.index, ""))
        return [found[(first + step) % len(found)][1] for step in range(min(PEERS_MAX, len(found)))]


def transfer_of(source: WeightSource | None) -> TransferStatus:
    """spec's source as a transaction keeps it: spec may have changed before it ends."""
    if source is None or source.type == "Disk":
        return TransferStatus()
    if source.type == "External":
        return TransferStatus(kind="External")
    if source.distributed is not None:
        sent = source.distributed
        return TransferStatus(kind=sent.transfer, transport=sent.transport, senders=_addresses(sent.senders))
    return TransferStatus(kind="Colocated", senders=_addresses(source.colocated.senders if source.colocated else ()))


def _addresses(senders: Iterable[Sender]) -> tuple[str, ...]:
    return tuple(address_of(sender.address, sender.port) for sender in senders)


def senders_for(transaction: WeightTransaction, engine: EngineView) -> tuple[str, ...]:
    """Those of the trainer's ranks that this engine hears from."""
    senders = transaction.source.senders
    if transaction.source.kind == "Colocated" and len(senders) > 1:
        return senders[engine.index % len(senders) :][:1]
    return senders


def peers_for(transaction: WeightTransaction, engine: EngineView, keepers: Keepers) -> list[str]:
    """Whom it can take the weights from. While it is being sent them, or reads them, it needs no peer: its order would
    change with each of the others that has them all."""
    alone = transaction.source.kind != "Kept" and not engine.has_failed(transaction.id)
    return [] if alone else keepers.peers(engine, transaction.root)


def transaction_source(
    transaction: WeightTransaction, senders: Iterable[str], peers: Iterable[str], allow_nonfinite: bool
) -> Source:
    """What an engine is told of a move of the fleet."""
    given = transaction.source
    return Source(
        kind=SourceKind(given.kind),
        senders=list(senders),
        transport=given.transport,
        members=1 if given.kind == "Colocated" and len(given.senders) > 1 else transaction.members,
        epoch=transaction.epoch,
        root=transaction.root,
        peers=list(peers),
        allow_nonfinite=allow_nonfinite,
    )


def kept_source(entry: CommittedVersion, engine: EngineView, keepers: Keepers) -> Source | None:
    """Where a version that the fleet has committed is found again; None: nowhere any more."""
    peers = keepers.peers(engine, entry.root)
    if entry.root and (peers or entry.path or engine.holds(entry.root)):
        return Source(kind=SourceKind.KEPT, root=entry.root, peers=peers, allow_nonfinite=True)
    return Source() if entry.path else None


def agents_of(engines: Collection[EngineView], kind: str) -> int:
    """How many agents the trainer's senders hear from."""
    return sum(1 if kind in INTO_THE_ENGINE else engine.nodes for engine in engines)
