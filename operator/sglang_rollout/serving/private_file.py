"""Small files that only we may read and that are whole or absent. Standard library only."""

from __future__ import annotations

import os
from pathlib import Path


def write_private(path: Path, data: bytes) -> None:
    """Replaces `path` by `data`, mode 0600, in one step that also holds when the machine stops."""
    temporary = path.with_name(f".{path.name}.new")
    # The mode counts only for a new file, and a left-over one may be of another mode.
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = os.fspath(path)  # a write does not say of what: whose disk is full is to be told
        raise
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
