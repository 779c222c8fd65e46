"""The base image of the shipped Dockerfiles: pulled where a registry has it, else made with debootstrap."""

from __future__ import annotations

import hashlib
import os
import ssl
from pathlib import Path

from e2e.cluster import versions
from e2e.cluster.debian import bootstrap, ensure_packages, pack
from e2e.cluster.docker import Engine, can_pull
from e2e.cluster.layout import Layout
from e2e.cluster.lock import exclusive
from e2e.cluster.mounts import remove_tree
from e2e.cluster.progress import say, step

_LABEL = "sglang-rollout.local-base"
_BUNDLE = "/usr/local/share/local-base/ca-bundle.crt"
"""Not Debian's own bundle: installing ca-certificates in a Dockerfile would write over it."""
_BUNDLE_VARIABLES = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_PASSED_ON = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL")


def ensure_debian_image(docker: Engine, layout: Layout | None = None) -> str:
    """Make `debian:bookworm-slim` present in the daemon and return its name.

    An image made here carries this machine's certificates, proxy and package index, so that pip and apt work in
    `docker build` as they do outside; the shipped Dockerfiles know nothing of it.
    """
    layout = layout or Layout.default()
    name = versions.DEBIAN_IMAGE
    with exclusive(layout.images / "debian.lock", f"image {name}", timeout=1200):
        shown = docker.docker("image", "inspect", "-f", f'{{{{index .Config.Labels "{_LABEL}"}}}}', name, check=False)
        label = shown.stdout.strip()
        if shown.returncode == 0 and label in ("", "<no value>", settings_key()):
            return name
        if shown.returncode != 0 and can_pull(docker, name):
            with step(f"pull {name}"):
                docker.docker("pull", name, timeout=600)
            return name
        with step(f"make {name} (no registry has it)"):
            _make(docker, layout, name)
    return name


def settings_key() -> str:
    """Changes with what the image takes over from this machine."""
    parts = [_host_bundle().read_bytes(), repr(sorted(environment().items())).encode(), *_pip_configs().values()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def environment() -> dict[str, str]:
    """Environment of the image."""
    found = dict.fromkeys(_BUNDLE_VARIABLES, _BUNDLE)
    for name in _PASSED_ON:
        for spelling in (name, name.lower()):
            if os.environ.get(spelling):
                found[spelling] = os.environ[spelling]
    return found


def _host_bundle() -> Path:
    paths = ssl.get_default_verify_paths()
    candidates = (os.environ.get("SSL_CERT_FILE"), paths.cafile, "/etc/ssl/certs/ca-certificates.crt")
    return next(Path(path) for path in candidates if path and Path(path).is_file())


def _pip_configs() -> dict[str, bytes]:
    """pip's configuration for all users of this machine, with the certificates where the image has them."""
    path = Path("/etc/pip.conf")
    if not path.is_file():
        return {}
    return {"etc/pip.conf": path.read_text().replace(str(_host_bundle()), _BUNDLE).encode()}


def _make(docker: Engine, layout: Layout, name: str) -> None:
    ensure_packages(layout, ["debootstrap"])
    log = layout.logs / "debian-image.log"
    root = layout.images / "debian-rootfs"
    remove_tree(root)
    root.mkdir(parents=True)
    try:
        bootstrap(layout, root, [], log)
        _add(root / _BUNDLE.lstrip("/"), _host_bundle().read_bytes())
        for path, content in _pip_configs().items():
            _add(root / path, content)
        # A package that starts its service would fail in a container that has no init.
        _add(root / "usr/sbin/policy-rc.d", b"#!/bin/sh\nexit 101\n", mode=0o755)
        changes = [f"ENV {key}={value}" for key, value in environment().items()]
        changes += [f"LABEL {_LABEL}={settings_key()}", 'CMD ["bash"]']
        flags = [word for change in changes for word in ("--change", change)]
        pack(root, [str(docker.client), "import", *flags, "-", name], docker.env, log)
    finally:
        remove_tree(root)
    say(f"{name} carries this machine's certificates and package settings: for local use, not to be pushed")


def _add(path: Path, content: bytes, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.chmod(mode)
