"""Points at which tests end the agent: named in the environment, passed in silence otherwise."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from sglang_rollout.agent.fault_points import ENV_FAULTS, EXIT_CODE, FaultPoints


async def test_without_words_nothing_happens() -> None:
    faults = FaultPoints.read({})
    for point in ("apply:before", "stage:mid"):
        await faults.at(point)
        faults.at_once(point)


async def test_a_hang_at_the_second_pass() -> None:
    faults = FaultPoints.read({ENV_FAULTS: "apply:begun=hang:2"})
    await faults.at("apply:begun")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await faults.at("apply:begun")
    await faults.at("apply:begun")


def test_the_process_ends_there() -> None:
    code = (
        "import asyncio, os; from sglang_rollout.agent.fault_points import FaultPoints; "
        "asyncio.run(FaultPoints.read(os.environ).at('check:after'))"
    )
    environment = {"PYTHONPATH": ":".join(sys.path), ENV_FAULTS: "check:after=exit"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == EXIT_CODE


@pytest.mark.parametrize("text", ["apply", "apply=explode", "apply="])
def test_a_wrong_word_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="is no <point>="):
        FaultPoints.read({ENV_FAULTS: text})
