"""Whom an engine takes weights from: who is told of peers, and of which."""

from __future__ import annotations

from datetime import UTC, datetime

from sglang_rollout.api import EngineStatus
from sglang_rollout.api.status import CommittedVersion, TransferStatus, WeightTransaction
from sglang_rollout.protocol.report import AgentReport, MoveReport, StagedWeights, StageReport
from sglang_rollout.transitions.engines import EngineView
from sglang_rollout.transitions.observed import PodView
from sglang_rollout.transitions.sources import PEERS_MAX, Keepers, kept_source, peers_for

ROOT = "r1"
MOVE = "g2.1:v2"


def engine(index: int, *holding: bool, error: str = "") -> EngineView:
    """holding: for each pod, whether it holds ROOT."""
    pods = {
        rank: PodView(f"f-e{index}-{rank}", f"p{index}-{rank}", index, rank, ip=f"10.{rank}.0.{index}")
        for rank in range(len(holding))
    }
    held = StageReport([StagedWeights("v2", ROOT)])
    move = MoveReport(MOVE, error=error)
    reports = {
        rank: AgentReport(1, "a", pod.uid, rank, stage=held if holding[rank] else StageReport(), move=move)
        for rank, pod in pods.items()
    }
    name = f"f-e{index}"
    return EngineView(index, name, len(holding), True, EngineStatus(name=name), pods=pods, reports=reports)


def test_peers_are_those_that_follow_and_not_the_same_for_all() -> None:
    engines = [engine(index, index not in (3, 7)) for index in range(20)]
    keepers = Keepers(engines)
    assert keepers.peers(engines[3], ROOT) == [f"10.0.0.{index}:30001" for index in (4, 5, 6, 8, 9, 10, 11, 12)]
    assert keepers.peers(engines[7], ROOT)[0] == "10.0.0.8:30001"
    assert len(keepers.peers(engines[7], ROOT)) == PEERS_MAX


def test_the_first_ones_follow_the_last() -> None:
    engines = [engine(0, True), engine(1, False), engine(2, False)]
    assert Keepers(engines).peers(engines[2], ROOT) == ["10.0.0.0:30001"]


def test_a_pod_asks_the_other_pods_of_its_engine_first() -> None:
    engines = [engine(0, True, True), engine(1, False, True), engine(2, True, True)]
    assert Keepers(engines).peers(engines[1], ROOT)[:2] == ["10.1.0.1:30001", "10.0.0.2:30001"]


def test_who_holds_them_needs_no_peer_and_finds_them_all_the_same() -> None:
    engines = [engine(0, True), engine(1, True)]
    keepers = Keepers(engines)
    assert keepers.peers(engines[0], ROOT) == []
    entry = CommittedVersion(version="v2", root=ROOT, committed_at=datetime(2026, 1, 1, tzinfo=UTC).isoformat())
    assert kept_source(entry, engines[0], keepers) is not None
    assert kept_source(entry, engine(2, False), Keepers([engine(2, False)])) is None


def test_an_engine_that_is_still_sent_the_weights_is_told_of_no_peer_before_it_fails() -> None:
    """Its order would change with each of the others that has them."""
    receiving, failed = engine(1, False), engine(2, False, error="the trainer has gone")
    keepers = Keepers([engine(0, True), receiving, failed])
    sent = WeightTransaction(id=MOVE, version="v2", source=TransferStatus(kind="Staged"), root=ROOT)
    assert peers_for(sent, receiving, keepers) == []
    assert peers_for(sent, failed, keepers) == ["10.0.0.0:30001"]
    kept = sent.model_copy(update={"source": TransferStatus(kind="Kept")})
    assert peers_for(kept, receiving, keepers) == ["10.0.0.0:30001"]
