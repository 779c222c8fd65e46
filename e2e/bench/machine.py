"""The machine and the versions that figures belong to."""

from __future__ import annotations

import os
import platform
import subprocess
import tomllib
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def describe(versions: Mapping[str, str]) -> list[str]:
    """Notes for a section: machine, versions, date, and what else the machine was doing."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    told = {"Linux": platform.release(), "Python": platform.python_version(), **versions}
    return [
        f"machine: {cores} cores of {_cpu_model()}, {memory:.0f} GiB",
        "versions: " + ", ".join(f"{name} {text}" for name, text in told.items()),
        f"taken {datetime.now(UTC):%Y-%m-%d %H:%M} UTC at commit {_commit()}",
        f"load average of the last 1, 5, 15 minutes when it began: {load()}",
    ]


def load() -> str:
    """How many processes wanted a core of late: figures of a machine that does other work are worth less."""
    return ", ".join(f"{value:.1f}" for value in os.getloadavg())


def library_versions(*names: str) -> dict[str, str]:
    return {name: version(name) for name in names}


def pinned_versions(extra: str, *names: str) -> dict[str, str]:
    """Of requirements that this environment does not have, from pyproject.toml's extra."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    pins = dict(line.split("==") for line in project["optional-dependencies"][extra])
    return {name: pins[name] for name in names}


def locked_version(lock: Path, name: str) -> str:
    """Of a requirement in a lock file of pip."""
    for line in lock.read_text().splitlines():
        if line.startswith(f"{name}=="):
            return line.split()[0].partition("==")[2]
    raise KeyError(f"{lock} does not lock {name}")


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str:
    """The commit, with a mark when the checkout differs from it; "unknown" outside a git checkout."""
    try:
        words = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--abbrev=10"]
        return subprocess.run(words, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
