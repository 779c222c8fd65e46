"""Which way NCCL and UCX went, as their logs tell: both choose by themselves, and say it nowhere else."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

NOTED = re.compile(r"Init CE|via P2P|via SHM|symmetric|UCX +(WARN|ERROR)|NCCL WARN")
NOTES = 24
LENGTH = 200  # of a line, its end
READ = "remote memory read by"
COLUMNS = 3  # of UCX's tables, as of version 1.23: range of sizes, description, transport and device


def notes(log: str) -> list[str]:
    """What is worth a look, each line once."""
    found = (line.strip()[-LENGTH:] for line in log.splitlines() if NOTED.search(line))
    return list(dict.fromkeys(found))[:NOTES]


def read_by(log: str) -> list[str]:
    """How UCX reads the other process' memory, from what UCX_PROTO_INFO=y has it print: a row for each range of sizes,
    as `0..inf zero-copy cuda_ipc/cuda`."""
    return list(dict.fromkeys(" ".join(row) for row in _rows(log.splitlines())))


def _rows(lines: Iterable[str]) -> Iterator[list[str]]:
    """Of all tables whose title is READ. A title has one cell."""
    reading = False
    for line in lines:
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 1:
            reading = READ in cells[0]
        elif reading and len(cells) == COLUMNS and cells[0] != "Range":
            yield cells
