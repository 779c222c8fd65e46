"""Which images there are, and their references: the tag is a digest of everything that goes in."""

from __future__ import annotations

import hashlib
import io
import tarfile
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
REPOSITORY = "sglang-rollout"
BASE = "debian:bookworm-slim"
_LEFT_OUT = ("__pycache__",)


@dataclass(frozen=True)
class Snapshot:
    """The inputs of an image at one moment: name and content cannot part when somebody edits meanwhile."""

    name: str
    context: bytes
    """The build context, a tar."""

    @property
    def ref(self) -> str:
        """repository/name:tag; the same inputs give the same tag on every machine."""
        return f"{REPOSITORY}/{self.name}:{hashlib.sha256(self.context).hexdigest()[:12]}"


@dataclass(frozen=True)
class Image:
    """One shipped Dockerfile and the files of the checkout that it copies."""

    name: str
    inputs: tuple[str, ...]
    """Files or folders, relative to the checkout. Nothing else is sent to Docker, so nothing else can get in."""

    @property
    def dockerfile(self) -> str:
        return f"images/{self.name}/Dockerfile"

    def snapshot(self, checkout: Path = CHECKOUT) -> Snapshot:
        """The inputs as they are now. The tar depends on them alone, not on their owners or times."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for path in self.files(checkout):
                content = path.read_bytes()
                entry = tarfile.TarInfo(path.relative_to(checkout).as_posix())
                entry.size = len(content)
                entry.mode = _mode(path)
                archive.addfile(entry, io.BytesIO(content))
        return Snapshot(self.name, buffer.getvalue())

    def files(self, checkout: Path = CHECKOUT) -> list[Path]:
        """All input files, in order. Raises FileNotFoundError when an input is missing."""
        found: set[Path] = set()
        for entry in (self.dockerfile, *self.inputs):
            path = checkout / entry
            if path.is_file():
                found.add(path)
            elif path.is_dir():
                found.update(file for file in path.rglob("*") if file.is_file() and _wanted(file))
            else:
                raise FileNotFoundError(f"{path}: an input of the image {self.name}")
        return sorted(found)


def _mode(path: Path) -> int:
    """A checkout may be group-writable or not: only the executable bit counts."""
    return 0o755 if path.stat().st_mode & 0o100 else 0o644


def _wanted(path: Path) -> bool:
    return not any(part in _LEFT_OUT for part in path.parts)


PACKAGE = "operator/sglang_rollout"
IMAGES = {
    image.name: image
    for image in (
        Image("operator", ("pyproject.toml", "images/extra.py", PACKAGE)),
        Image("agent", ("pyproject.toml", "images/extra.py", "images/agent", PACKAGE)),
        Image("router", ("pyproject.toml", "images/extra.py", PACKAGE)),
        Image("engine-cpu", ()),
    )
}
