"""The header of one safetensors file: all that is known of its tensors without reading them."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100 << 20  # the format's own limit


class HeaderCutOff(Exception):
    """The file ends within its header; the sentence says so."""


@dataclass(frozen=True)
class Header:
    """content: the decoded JSON, not checked. base: offset of the first tensor's byte. size: of the whole file."""

    content: Any
    base: int
    size: int


def read_header(path: Path) -> Header:
    """Raises HeaderCutOff; FileNotFoundError and other OSErrors; ValueError when the header is no JSON."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise HeaderCutOff(f"{path} ends within its header ({size} bytes): is it still being written?")
        return Header(json.loads(file.read(length)), base=8 + length, size=size)
