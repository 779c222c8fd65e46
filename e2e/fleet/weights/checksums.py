"""SGLang's own checksum over all parameters, of every engine of a fleet."""

from __future__ import annotations

from e2e.deployment.fleet import Fleet
from e2e.deployment.plugin import Plugin
from sglang_rollout.api.status import WeightCheckStatus


async def checksum(fleet: Fleet, plugin: Plugin) -> str:
    """Of each engine; they are equal."""
    said = await plugin("check", fleet.name, "checksum", "-o", "json")
    assert said.code == 0, said
    check = WeightCheckStatus.from_object(said.json["fleet"]["status"]["lastWeightCheck"])
    assert {one.result for one in check.engines} == {"Passed"}
    (found,) = {one.checksum for one in check.engines}
    assert found
    return found
