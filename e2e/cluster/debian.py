"""Debian's side: packages that the tools need, and root file systems made with debootstrap."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from e2e.cluster import versions
from e2e.cluster.errors import ClusterError
from e2e.cluster.layout import Layout
from e2e.cluster.process import run
from e2e.cluster.progress import step

_POLICY = Path("/usr/sbin/policy-rc.d")


def ensure_packages(layout: Layout, names: Sequence[str]) -> None:
    """Install the Debian packages that are missing; services they bring are not started, nothing is removed."""
    missing = [name for name in names if not _installed(name)]
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise ClusterError(f"install these Debian packages first (root and apt-get are needed): {' '.join(missing)}")
    log = layout.logs / "apt.log"
    env = {"DEBIAN_FRONTEND": "noninteractive"}
    with step(f"install Debian packages: {' '.join(missing)}"), _services_stay_off():
        run(["apt-get", "-q", "update"], timeout=300, env=env, log=log)
        options = ["-q", "-y", "--no-install-recommends", "--no-remove"]
        run(["apt-get", "install", *options, *missing], timeout=900, env=env, log=log)


def _installed(name: str) -> bool:
    query = ["dpkg-query", "-W", "-f", "${db:Status-Status}", name]
    return run(query, timeout=30, check=False).stdout == "installed"


@contextmanager
def _services_stay_off() -> Iterator[None]:
    """Debian starts a package's service at once; a second Docker for all is not what the user asked for."""
    if _POLICY.exists():
        yield
        return
    _POLICY.write_text("#!/bin/sh\nexit 101\n")
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink()


def mirrors() -> tuple[str, str | None]:
    """The archive that this machine's apt uses for the suite, and the one for its security updates, if any."""
    targets = run(
        ["apt-get", "indextargets", "--format", "$(SITE) $(CODENAME)", "Created-By: Packages"], timeout=60
    ).stdout
    return pick_mirrors(targets, versions.DEBIAN_SUITE)


def pick_mirrors(targets: str, suite: str) -> tuple[str, str | None]:
    """Choose from lines of "site codename"."""
    sites = [line.split() for line in targets.splitlines() if len(line.split()) == 2]
    archive = next((site for site, codename in sites if codename == suite), None)
    security = next((site for site, codename in sites if codename == f"{suite}-security"), None)
    if archive is None:
        raise ClusterError(f"apt has no archive for Debian {suite}: add one to its sources and run apt-get update")
    return archive, security


def sources(archive: str, security: str | None) -> str:
    """A sources.list for the suite."""
    suite = versions.DEBIAN_SUITE
    lines = [f"deb {archive} {suite} main", f"deb {archive} {suite}-updates main"]
    if security is not None:
        lines.append(f"deb {security} {suite}-security main")
    return "\n".join(lines) + "\n"


def bootstrap(layout: Layout, target: Path, include: Sequence[str], log: Path) -> None:
    """A minimal root file system with the packages `include`, in the new folder `target`."""
    packages = layout.cluster / "debs"
    packages.mkdir(parents=True, exist_ok=True)
    archive, security = mirrors()
    argv = ["debootstrap", "--variant=minbase", f"--cache-dir={packages}"]
    if include:
        argv.append(f"--include={','.join(include)}")
    run([*argv, versions.DEBIAN_SUITE, str(target), archive], timeout=900, log=log)
    (target / "etc/apt/sources.list").write_text(sources(archive, security))


def pack(root: Path, into: Sequence[str], env: dict[str, str], log: Path) -> None:
    """Stream the root file system as a tar, without documents, caches and devices, into the command `into`."""
    left_out = (
        "./var/cache/apt/*", "./var/lib/apt/lists/*", "./var/log/*", "./usr/share/doc/*", "./usr/share/man/*",
        "./usr/share/locale/*", "./proc/*", "./sys/*", "./dev/*", "./tmp/*",
    )  # fmt: skip
    argv = ["tar", "-C", str(root), "--numeric-owner", *(f"--exclude={name}" for name in left_out), "-c", "."]
    with log.open("ab") as stream, subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=stream) as tar:
        try:
            done = subprocess.run(
                into,
                stdin=tar.stdout,
                stdout=stream,
                stderr=stream,
                env={**os.environ, **env},
                timeout=600,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            tar.kill()
            raise ClusterError(f"{' '.join(into[:3])}: not done after 600 s; see {log}") from error
    if done.returncode != 0 or tar.returncode != 0:
        raise ClusterError(f"{' '.join(into[:3])} refused the file system {root}; see {log}")
