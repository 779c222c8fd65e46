"""How the bytes of a version come to an engine: by which way, and from whom."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ..api.status import CommittedVersion, TransferStatus, WeightTransaction
from ..api.weights import Sender, WeightSource
from ..protocol.weights import Source, SourceKind
from .engines import EngineView, host_port

PEERS_MAX = 8  # that an order names: one will do, and the others are for when it dies
# A trainer gives these to the engine itself, through rank 0's agent alone.
INTO_THE_ENGINE = ("Direct", "Colocated")


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
    return tuple(host_port(sender.address, sender.port) for sender in senders)


def transaction_source(
    transaction: WeightTransaction, engine: EngineView, everyone: Collection[EngineView], allow_nonfinite: bool
) -> Source:
    """What an engine is told of a move of the fleet."""
    given = transaction.source
    senders = given.senders
    if given.kind == "Colocated" and len(senders) > 1:
        senders = senders[engine.index % len(senders) :][:1]
    return Source(
        kind=SourceKind(given.kind),
        senders=list(senders),
        transport=given.transport,
        members=1 if given.kind == "Colocated" and len(given.senders) > 1 else transaction.members,
        epoch=transaction.epoch,
        root=transaction.root,
        peers=keepers(transaction.root, engine, everyone),
        allow_nonfinite=allow_nonfinite,
    )


def kept_source(entry: CommittedVersion, engine: EngineView, everyone: Collection[EngineView]) -> Source | None:
    """Where a version that the fleet has committed is found again; None: nowhere any more."""
    peers = keepers(entry.root, engine, everyone)
    if entry.root and (peers or entry.path):
        return Source(kind=SourceKind.KEPT, root=entry.root, peers=peers, allow_nonfinite=True)
    return Source() if entry.path else None


def keepers(root: str, engine: EngineView, everyone: Collection[EngineView]) -> list[str]:
    """host:port of agents that hold these weights, this engine's own first, then others from its index on, so that
    many engines do not all ask the same one."""
    if not root:
        return []
    others = sorted(everyone, key=lambda other: (other is not engine, (other.index - engine.index) % 1024))
    found = [address for other in others for address in other.keeps(root)]
    return found[:PEERS_MAX]


def agents_of(engines: Collection[EngineView], kind: str) -> int:
    """How many agents the trainer's senders hear from."""
    return sum(1 if kind in INTO_THE_ENGINE else engine.nodes for engine in engines)
