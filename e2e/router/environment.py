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

# The last release under the old name, with what its launcher imports.
OLD_ROUTER = ("sglang-router==0.3.2", "setproctitle==1.3.7")
INSTALL_SECONDS = 600
_PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def smg_python() -> Path:
    """Python of an environment with the `router` extra, as in the router's image; made when it is not there."""
    extra = tomllib.loads(_PYPROJECT.read_text())["project"]["optional-dependencies"]["router"]
    return _environment("venv-router", tuple(extra))


def old_router_python() -> Path:
    """Python of an environment with sglang-router, without the serving stack that it names but does not need."""
    return _environment("venv-sglang-router", OLD_ROUTER, ("--no-deps",))


def ensure_front() -> None:
    """HAProxy, as in the router's image; its service is not started."""
    if shutil.which("haproxy") is None:
        ensure_packages(Layout.default(), ["haproxy"])


def _environment(name: str, requirements: tuple[str, ...], options: tuple[str, ...] = ()) -> Path:
    key = hashlib.sha256("\n".join(requirements).encode()).hexdigest()[:12]
    folder = cache_root() / name / key
    python, ready = folder / "bin" / "python", folder / ".ready"
    if ready.exists():
        return python
    with exclusive(folder.with_suffix(".lock"), name, timeout=INSTALL_SECONDS), step(f"install {requirements[-1]}"):
        if not ready.exists():
            log = folder.with_suffix(".log")
            run(["python3", "-m", "venv", "--clear", folder], timeout=120, log=log)
            install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            run([*install, *options, *requirements], timeout=INSTALL_SECONDS, log=log)
            ready.touch()
    return python
