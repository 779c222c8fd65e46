"""Weights that are staged ahead: a trainer is told that they are there when every engine that takes part has them."""

from __future__ import annotations

from sglang_rollout.client.verdict import Attempt, prepare_verdict

from .simulation import Simulation
from .test_fleet_simulation import sent


def test_engines_that_do_not_have_them_yet_are_named() -> None:
    fleet = Simulation()
    fleet.settle()
    fleet.trainers = {"t1"}
    fleet.patch(weights={"prepare": {"version": "t1", "source": sent("t1")["source"]}})
    fleet.reconcile()
    first, second = sorted(uid for uid, pod in fleet.pods.items() if pod.engine_index is not None)
    told: list[tuple[int, str, bool]] = []
    for uid in (first, second):
        for _ in range(4):
            fleet.hear(uid)
            fleet.run_pod(uid)
            fleet.deliver(uid)
            fleet.reconcile()
        prepared = fleet.weights.prepared
        assert prepared is not None
        attempt = Attempt("t1", fleet.rollout.metadata.generation)
        verdict = prepare_verdict(fleet.object, attempt)
        told.append((prepared.engines, prepared.message, verdict is not None and verdict.outcome == "Prepared"))
    name = next(pod.name for uid, pod in fleet.pods.items() if uid == second).rpartition("-")[0]
    assert told == [(1, f"waiting for {name}", False), (2, "", True)]
