"""A spec that changes ten times a second: the last one wins, no engine dies, no label is wrong."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest

from e2e.deployment import answers
from e2e.deployment.fleet import Fleet
from e2e.deployment.plugin import Plugin
from e2e.fleet.journal import Journal, path_of
from e2e.fleet.load import Load

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(400)]

SECONDS = 60
EVERY_SECONDS = 0.1
ALL = ("weights", "kvCache", "cudaGraph")


def a_spec(chosen: random.Random, journal: Journal) -> dict[str, Any]:
    """Any state, weights and memory that the API server takes."""
    state = chosen.choice(("Running", "Paused"))
    released = state == "Paused" and chosen.random() < 0.5
    cache = "Released" if released else "Resident"
    weights = "Released" if released and chosen.random() < 0.5 else "Resident"
    label = chosen.choice(journal.order[-2:])
    source = {"type": "Disk", "disk": {"path": path_of(journal.models[label])}}
    return {
        "execution": {"state": state, "pauseMode": chosen.choice(("Abort", "Retract", "InPlace"))},
        "memory": {"weights": weights, "kvCache": cache, "cudaGraph": cache},
        "weights": {"version": label, "source": source},
    }


async def test_the_last_of_many_specs_wins(fleet: Fleet, load: Load, plugin: Plugin, journal: Journal) -> None:
    label, path = journal.next()
    assert (await plugin("weights", "set", fleet.name, label, "--path", path)).code == 0
    # With the flags that releasing needs: to get them, engines start again.
    assert (await plugin("release", fleet.name, "--pause")).code == 0
    assert (await plugin("resume", fleet.name, "--continue")).code == 0
    before = [(engine.start_id, engine.restarts) for engine in (await fleet.read()).status.engines]
    chosen = random.Random(7)
    async with load() as seen:
        ends, patches = time.monotonic() + SECONDS, 0
        while time.monotonic() < ends:
            due = time.monotonic() + EVERY_SECONDS
            await fleet.patch(**a_spec(chosen, journal))
            patches += 1
            await asyncio.sleep(max(due - time.monotonic(), 0.0))
        assert patches > 3 * SECONDS, "too few specs to tell"
        resident = dict.fromkeys(ALL, "Resident")
        await fleet.patch(execution={"state": "Running", "pauseMode": "Retract"}, memory=resident)
        await fleet.move_weights(label, path)
        await fleet.until_serving(label, timeout=120)
        settled = time.monotonic()
        await seen.more(6, version=label)
    assert answers.failures(seen.since(settled)) == []
    assert answers.versions(seen.since(settled)).keys() == {label}
    after = [(engine.start_id, engine.restarts) for engine in (await fleet.read()).status.engines]
    assert after == before, "an engine restarted"
    status = (await fleet.read()).status
    assert status.weights is not None
    assert (status.weights.phase, status.execution_state) == ("Idle", "Running"), "something is half done"
    assert [(engine.paused, engine.released, engine.weight_version) for engine in status.engines] == [
        (False, (), label)
    ] * 2
    assert (await plugin("check", fleet.name, "checksum")).code == 0
