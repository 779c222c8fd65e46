"""Folders that may have file systems mounted in them: unmounted first, then removed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from e2e.cluster.process import run


def mounted_below(folder: Path, mountinfo: str | None = None) -> list[str]:
    """Mount points at or below `folder`, the deepest first."""
    text = Path("/proc/self/mountinfo").read_text() if mountinfo is None else mountinfo
    points = [_unescaped(line.split()[4]) for line in text.splitlines()]
    root = str(folder)
    return sorted((point for point in points if point == root or point.startswith(root + os.sep)), reverse=True)


def _unescaped(point: str) -> str:
    """The kernel writes white space and backslashes as octal numbers."""
    for code, letter in ((r"\040", " "), (r"\011", "\t"), (r"\012", "\n"), (r"\134", "\\")):
        point = point.replace(code, letter)
    return point


def unmount_below(folder: Path) -> None:
    """Detach what is mounted at or below `folder`."""
    for point in mounted_below(folder):
        run(["umount", "-l", point], timeout=20)


def remove_tree(folder: Path) -> None:
    """Remove the folder. What was mounted in it, by a debootstrap that was killed or a container, is not touched."""
    unmount_below(folder)
    if folder.exists():
        shutil.rmtree(folder)
