"""Container images as docker archives, written without a daemon, under exactly the names they are given.

`docker save` would drop "docker.io/" from a name, and kind looks for the full one. kind reads the tags from whichever
of `repositories` and `manifest.json` comes first in the archive, and of the latter only the first image; so
`repositories` is written first.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_EPOCH = 1_700_000_000
"""One time for all files: the same content gives the same image."""
_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class ImageSource:
    """One image of a single layer: its full name, the folder it holds, and what it runs."""

    name: str
    root: Path
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()


def write_archive(path: Path, images: Sequence[ImageSource]) -> None:
    """Write all images into one archive that `docker load` and `ctr images import` read."""
    manifest, repositories = [], dict[str, dict[str, str]]()
    beside = path.with_name(f".{path.name}")
    with tarfile.open(beside, "w", format=tarfile.GNU_FORMAT) as archive:
        written: set[str] = set()
        for image in images:
            with tempfile.TemporaryFile(dir=path.parent) as layer:
                digest = _write_layer(layer, image.root)
                config = _config(image, digest)
                config_name = f"{hashlib.sha256(config).hexdigest()}.json"
                layer_name = f"{digest}/layer.tar"
                if layer_name not in written:
                    _add_stream(archive, layer_name, layer)
            if config_name not in written:
                _add(archive, config_name, config)
            written |= {layer_name, config_name}
            manifest.append({"Config": config_name, "RepoTags": [image.name], "Layers": [layer_name]})
            repository, _, tag = image.name.rpartition(":")
            repositories.setdefault(repository, {})[tag] = digest
        _add(archive, "repositories", json.dumps(repositories).encode())
        _add(archive, "manifest.json", json.dumps(manifest).encode())
    beside.rename(path)


def _config(image: ImageSource, layer_digest: str) -> bytes:
    run: dict[str, object] = {"Env": [_PATH]}
    if image.entrypoint:
        run["Entrypoint"] = list(image.entrypoint)
    if image.command:
        run["Cmd"] = list(image.command)
    document = {
        "architecture": "amd64",
        "os": "linux",
        "created": "2023-11-14T22:13:20Z",
        "config": run,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer_digest}"]},
        "history": [{"created": "2023-11-14T22:13:20Z", "created_by": "sglang-rollout"}],
    }
    return json.dumps(document, sort_keys=True).encode()


def _write_layer(stream: IO[bytes], root: Path) -> str:
    """Tar the folder, owned by root, in a fixed order; returns the SHA-256 of the tar."""
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as layer:
        for folder, folders, files in os.walk(root):
            folders.sort()
            for name in sorted(folders + files):
                path = Path(folder, name)
                entry = layer.gettarinfo(path, str(path.relative_to(root)))
                entry.uid = entry.gid = 0
                entry.uname = entry.gname = ""
                entry.mtime = _EPOCH
                if entry.isreg():
                    with path.open("rb") as content:
                        layer.addfile(entry, content)
                else:
                    layer.addfile(entry)
    stream.seek(0)
    digest = hashlib.sha256()
    while block := stream.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def _add_stream(archive: tarfile.TarFile, name: str, stream: IO[bytes]) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = stream.seek(0, io.SEEK_END)
    entry.mtime = _EPOCH
    stream.seek(0)
    archive.addfile(entry, stream)


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    _add_stream(archive, name, io.BytesIO(content))
