"""The script that takes an extra's pins out of pyproject.toml inside docker build."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from e2e.images.catalogue import CHECKOUT


def printed(extra: str) -> list[str]:
    argv = [sys.executable, str(CHECKOUT / "images/extra.py"), str(CHECKOUT / "pyproject.toml"), extra]
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=30).stdout.split()


@pytest.mark.parametrize("extra", ["operator", "agent", "router"])
def test_prints_exact_pins(extra: str) -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    assert printed(extra) == project["optional-dependencies"][extra]
    assert all("==" in requirement for requirement in printed(extra))


def test_the_agent_shares_its_pins_with_the_cpu_environment() -> None:
    """What the payload brings stands before the engine's own packages for the agent: the same versions, then."""
    lock = Path(CHECKOUT / "e2e/sglang_cpu/requirements.lock").read_text()
    locked = dict(line.split(" ")[0].split("==") for line in lock.splitlines() if "==" in line)
    for line in (CHECKOUT / "images/agent/site-requirements.txt").read_text().splitlines():
        if "==" in line:
            name, version = line.split("==")
            assert locked.get(name.replace("_", "-"), version) == version
