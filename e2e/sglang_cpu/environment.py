"""The Python environment of the CPU engine: SGLang from a lock file, on Debian's Python, in the cache.

Debian 12's own interpreter is used, since the container image has the same one at the same place: the environment
is mounted read-only into engine pods and works there under any path.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from pathlib import Path

from e2e.cluster.debian import ensure_packages
from e2e.cluster.errors import ClusterError
from e2e.cluster.layout import Layout, cache_root
from e2e.cluster.lock import exclusive
from e2e.cluster.process import run
from e2e.cluster.progress import say, step
from e2e.sglang_cpu.errors import SGLangCpuError

HERE = Path(__file__).parent
LOCK_FILE = HERE / "requirements.lock"
SHIMS = HERE / "shims"
PYTHON = Path("/usr/bin/python3.11")
PIP = "pip==25.3"
DEBIAN_PACKAGES = ("python3", "python3-venv", "libnuma1", "libgomp1")
MOUNT_PATH = "/opt/sglang-cpu"
"""Where engine pods see the environment."""

DOWNLOAD_SECONDS = 3600
INSTALL_SECONDS = 1200
FREE_BYTES = 12 * 2**30
"""Wheels (3.2 GB) and what is unpacked from them (5.6 GB) are on disk together for a moment."""

_LARGE = ("nvidia-", "torch==", "triton==")
_IMPORTS = "import torch, sglang, sgl_kernel, sglang.launch_server; print(sglang.__version__)"


def key() -> str:
    """Changes with everything that the environment is made from."""
    digest = hashlib.sha256(f"1 {PYTHON} {PIP}".encode())
    for path in (LOCK_FILE, *sorted(SHIMS.rglob("*.py"))):
        digest.update(path.relative_to(HERE).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def folder() -> Path:
    """Where the environment is, or will be."""
    return cache_root() / "sglang-cpu" / key()


def interpreter() -> Path:
    """The environment's Python. Raises SGLangCpuError when it is not installed."""
    if not installed():
        raise SGLangCpuError("the CPU engine is not installed: python -m e2e.sglang_cpu install")
    return folder() / "bin" / "python3"


def installed() -> bool:
    """Only a whole environment counts: the mark is written last."""
    return _mark(folder()).exists()


def install() -> Path:
    """Make the environment unless it is there; goes on where an earlier try was broken off. Returns its folder."""
    target = folder()
    with exclusive(target.with_suffix(".lock"), "SGLang for CPU", timeout=DOWNLOAD_SECONDS + INSTALL_SECONDS):
        if installed():
            return target
        ensure_packages(Layout.default(), DEBIAN_PACKAGES)
        _require_room(target.parent)
        log = target.with_suffix(".log")
        wheels = target.with_suffix(".wheels")
        with step(f"SGLang for CPU: new environment {target}"):
            shutil.rmtree(target, ignore_errors=True)
            run([PYTHON, "-m", "venv", target], timeout=120, log=log)
            _pip(target, ["install", PIP], timeout=300, log=log)
        with step("SGLang for CPU: download 3.2 GB of packages"):
            _download(target, wheels, log)
        with step("SGLang for CPU: install them"):
            _pip(
                target,
                ["install", "--no-deps", "--no-index", "--find-links", wheels, "-r", LOCK_FILE],
                timeout=INSTALL_SECONDS,
                log=log,
            )
            _add_shims(target)
        with step("SGLang for CPU: import it"):
            run([target / "bin/python3", "-c", _IMPORTS], timeout=300, env={"SGLANG_USE_CPU_ENGINE": "1"}, log=log)
        _mark(target).write_text(f"{LOCK_FILE.name} {key()}\n")
        shutil.rmtree(wheels)
    return target


def _mark(target: Path) -> Path:
    return target / "complete"


def _require_room(parent: Path) -> None:
    parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(parent).free
    if free < FREE_BYTES:
        raise SGLangCpuError(
            f"{parent} has {free / 2**30:.1f} GiB free, {FREE_BYTES / 2**30:.0f} GiB are needed: "
            "make room or set SGLANG_ROLLOUT_CACHE to a folder on a larger disk"
        )


def _pip(target: Path, words: list[str | Path], *, timeout: float, log: Path) -> None:
    options = ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    run([target / "bin/python3", "-m", "pip", words[0], *options, *words[1:]], timeout=timeout, log=log)


def batches(lock: str) -> list[list[str]]:
    """The lock file's lines in the parts that are fetched one after the other: a broken download loses one part."""
    lines = [line for line in lock.splitlines() if "==" in line]
    large = [line for line in lines if line.startswith(_LARGE)]
    return [*([line] for line in large), [line for line in lines if line not in large]]


def _download(target: Path, wheels: Path, log: Path) -> None:
    """Fetch every wheel of the lock file, hashes checked; those of an earlier try are kept."""
    wheels.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + DOWNLOAD_SECONDS
    told = time.monotonic()
    part = wheels / "part.lock"
    for lines in batches(LOCK_FILE.read_text()):
        part.write_text("\n".join(lines) + "\n")
        words: list[str | Path] = ["download", "--quiet", "--retries", "10", "--timeout", "60", "--no-deps"]
        words += ["--only-binary", ":all:", "--require-hashes", "-d", wheels, "-r", part]
        try:
            _pip(target, words, timeout=max(1.0, deadline - time.monotonic()), log=log)
        except ClusterError as error:
            raise SGLangCpuError(f"{error}\nwhat is downloaded is kept: run it again to go on") from error
        if time.monotonic() - told > 10:
            told = time.monotonic()
            size = sum(path.stat().st_size for path in wheels.glob("*.whl")) / 1e9
            say(f"SGLang for CPU: {size:.1f} of 3.2 GB are here")


def _add_shims(target: Path) -> None:
    site = target / "lib" / "python3.11" / "site-packages"
    shutil.copytree(SHIMS, site, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    run([target / "bin/python3", "-m", "compileall", "-q", site / "sgl_kernel"], timeout=60)
