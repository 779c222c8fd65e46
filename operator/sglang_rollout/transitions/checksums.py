"""Checksums of whole engines held against each other: engines of one version that are divided alike have equal ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)


def unlike(sums: Mapping[Name, tuple[Hashable, str]]) -> dict[Name, tuple[str, str]]:
    """Of those that differ from most of their kind: the checksum, and that of most. sums: by name, the kind and the
    checksum, which is empty where there is none. Of two that differ from each other, none can be told to be right: the
    greater is taken for it."""
    kinds: dict[Hashable, dict[Name, str]] = {}
    for name, (kind, checksum) in sums.items():
        if checksum:
            kinds.setdefault(kind, {})[name] = checksum
    found: dict[Name, tuple[str, str]] = {}
    for same in kinds.values():
        count = Counter(same.values())
        most = max(count, key=lambda value: (count[value], value))
        found |= {name: (checksum, most) for name, checksum in same.items() if checksum != most}
    return found
