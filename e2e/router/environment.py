"""The real routers from PyPI in environments of their own, and the front's program from Debian."""

from __future__ import annotations

import hashlib
import shutil
import tomllib
from pathlib import Path

from e2e.cluster.debian import ensure_packages
from e2e.cluster.layout import Layout, cache_root
from e2e.cluster.lock import exclusive
from e2e.cluster.process import run
from e2e.cluster.progress import step

# The last release under the old name, with what it needs.
OLD_ROUTER = (
    "sglang-router==0.3.2",
    "aiohttp==3.14.5",
    "fastapi==0.165.0",
    "orjson==3.13.0",
    "setproctitle==1.3.8",
    "uvicorn==0.54.0",
)
INSTALL_SECONDS = 600
_PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def smg_python() -> Path:
    """Python of an environment with the `router` extra, as in the router's image; made when it is not there."""
    extra = tomllib.loads(_PYPROJECT.read_text())["project"]["optional-dependencies"]["router"]
    return _environment("venv-router", tuple(extra))


def old_router_python() -> Path:
    """Python of an environment with sglang-router."""
    return _environment("venv-sglang-router", OLD_ROUTER)


def ensure_front() -> None:
    """HAProxy, as in the router's image; its service is not started."""
    if shutil.which("haproxy") is None:
        ensure_packages(Layout.default(), ["haproxy"])


def _environment(name: str, requirements: tuple[str, ...]) -> Path:
    key = hashlib.sha256("\n".join(requirements).encode()).hexdigest()[:12]
    folder = cache_root() / name / key
    python, ready = folder / "bin" / "python", folder / ".ready"
    if ready.exists():
        return python
    with exclusive(folder.with_suffix(".lock"), name, timeout=INSTALL_SECONDS), step(f"install {name}"):
        if not ready.exists():
            log = folder.with_suffix(".log")
            run(["python3", "-m", "venv", "--clear", folder], timeout=120, log=log)
            pip: list[str | Path] = [
                python,
                "-m",
                "pip",
                "install",
                "-q",
                "--disable-pip-version-check",
                *requirements,
            ]
            run(pip, timeout=INSTALL_SECONDS, log=log)
            ready.touch()
    return python
