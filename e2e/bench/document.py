"""docs/performance.md: the figures stand between markers, the prose around them is written by hand."""

from __future__ import annotations

import re
from pathlib import Path

from e2e.cluster.process import write_atomically

DOCUMENT = Path(__file__).parents[2] / "docs" / "performance.md"


class MarkerMissing(Exception):
    """The document has no place for a section."""


def put(name: str, text: str, document: Path = DOCUMENT) -> None:
    """Replace what stands between <!-- begin NAME --> and <!-- end NAME -->. Raises MarkerMissing."""
    write_atomically(document, replaced(document.read_text(), name, text))


def replaced(content: str, name: str, text: str) -> str:
    """`content` with the section `name` exchanged. Raises MarkerMissing."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    changed, count = pattern.subn(lambda _: f"{begin}\n{text}\n{end}", content)
    if count != 1:
        raise MarkerMissing(f"expected one section {begin} ... {end}, found {count}: write these two lines once")
    return changed
