"""Weight checks over the fleet: each once for each request, with what every engine said."""

from __future__ import annotations

import pytest

from e2e.deployment import answers
from e2e.deployment.fleet import Fleet
from e2e.deployment.plugin import Plugin, Said
from e2e.fleet.journal import Journal
from e2e.fleet.load import Load
from sglang_rollout.api.status import WeightCheckStatus

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]


def told(said: Said) -> WeightCheckStatus:
    return WeightCheckStatus.from_object(said.json["fleet"]["status"]["lastWeightCheck"])


async def checksum(fleet: Fleet, plugin: Plugin) -> str:
    """Of every engine; they are equal."""
    said = await plugin("check", fleet.name, "checksum", "-o", "json")
    assert said.code == 0, said
    check = told(said)
    assert [(one.name, one.result) for one in check.engines] == [("ops-e0", "Passed"), ("ops-e1", "Passed")]
    (found,) = {one.checksum for one in check.engines}
    assert found
    assert found in check.message
    return found


async def test_checksums_of_engines_are_compared_and_told(fleet: Fleet, plugin: Plugin, journal: Journal) -> None:
    first = await checksum(fleet, plugin)
    label, path = journal.next()
    assert (await plugin("weights", "set", fleet.name, label, "--path", path)).code == 0
    assert await checksum(fleet, plugin) != first


async def test_a_comparison_is_unsupported_on_cpu_with_sglangs_reason(fleet: Fleet, plugin: Plugin) -> None:
    said = await plugin("check", fleet.name, "snapshot")
    assert said.code == 0, said
    said = await plugin("check", fleet.name, "compare", "-o", "json")
    assert said.code == 1
    check = told(said)
    assert check.result == "Unsupported"
    assert {one.result for one in check.engines} == {"Unsupported"}
    assert "GPU" in check.message
    await fleet.until_ready(timeout=30)


async def test_reset_weights_are_loaded_again_before_they_serve(
    fleet: Fleet, plugin: Plugin, load: Load, journal: Journal
) -> None:
    assert (await plugin("check", fleet.name, "reset")).code == 2, "without --yes nothing is overwritten"
    before = await checksum(fleet, plugin)
    # The load's own checks are the point: no answer may come from the random weights.
    async with load() as seen:
        said = await plugin("check", fleet.name, "reset", "--yes")
        assert said.code == 0, said
        await fleet.until_ready(timeout=60)
        await seen.more(4, version=journal.current)
    assert answers.versions(seen.answers).keys() == {journal.current}
    assert await checksum(fleet, plugin) == before


async def test_a_request_id_asks_once(fleet: Fleet, plugin: Plugin) -> None:
    once = await plugin("check", fleet.name, "checksum", "--request-id", "once", "-o", "json")
    again = await plugin("check", fleet.name, "checksum", "--request-id", "once", "-o", "json")
    assert (once.code, again.code) == (0, 0)
    assert told(again) == told(once)
    other = await plugin("check", fleet.name, "snapshot", "--request-id", "once")
    assert other.code == 1
    assert "a requestID names one request" in other.err
    unknown = await plugin("check", fleet.name, "polish")
    assert unknown.code == 2
