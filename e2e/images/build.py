"""Builds the images with the cluster's Docker; an image whose inputs have not changed is not built again."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

from e2e.cluster.base_image import ensure_debian_image
from e2e.cluster.docker import Engine, engine
from e2e.cluster.errors import ClusterError
from e2e.cluster.layout import Layout
from e2e.cluster.lock import exclusive
from e2e.cluster.progress import step
from e2e.images.catalogue import IMAGES, REPOSITORY, Image

BUILD_SECONDS = 1200
_KEPT = 3
"""Builds of one image that are kept; older ones would fill the disk of whoever edits code all day."""


def build_all(names: Iterable[str] = IMAGES) -> dict[str, str]:
    """Build the named images where they are missing; returns name -> reference."""
    layout = Layout.default()
    docker = engine(layout)
    docker.start()
    with exclusive(layout.images / "build.lock", "images", timeout=BUILD_SECONDS * 2):
        ensure_debian_image(docker, layout)
        return {name: _build(docker, IMAGES[name], layout.logs / f"image-{name}.log") for name in names}


def _build(docker: Engine, image: Image, log: Path) -> str:
    snapshot = image.snapshot()
    ref = snapshot.ref
    if docker.docker("image", "inspect", ref, check=False).returncode == 0:
        return ref
    with step(f"image {ref}"):
        argv = [str(docker.client), "build", "--file", image.dockerfile, "--tag", ref, "-"]
        # The classic builder is in every Docker; BuildKit is a separate plug-in since Docker 23.
        env = {**os.environ, **docker.env, "DOCKER_BUILDKIT": "0"}
        log.parent.mkdir(parents=True, exist_ok=True)
        begin = time.monotonic()
        with log.open("wb") as stream:
            try:
                done = subprocess.run(
                    argv, input=snapshot.context, stdout=stream, stderr=stream, env=env, timeout=BUILD_SECONDS,
                    check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired as error:
                raise ClusterError(f"image {image.name}: not built after {BUILD_SECONDS} s; see {log}") from error
        if done.returncode != 0:
            tail = "\n  ".join(log.read_text(errors="replace").splitlines()[-15:])
            took = time.monotonic() - begin
            raise ClusterError(f"image {image.name}: build failed after {took:.0f} s; the end of {log}:\n  {tail}")
    _forget_old(docker, image)
    return ref


def _forget_old(docker: Engine, image: Image) -> None:
    """Newest first, as Docker lists them; one that a container uses stays, since Docker refuses."""
    listed = docker.docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}}", f"{REPOSITORY}/{image.name}")
    for ref in listed.stdout.split()[_KEPT:]:
        docker.docker("image", "rm", ref, check=False)
