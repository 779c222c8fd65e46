"""Checksums of whole engines held against each other: engines of one version that are divided alike have equal ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)


def unlike(sums: Mapping[Name, tuple[Hashable, str]]) -> dict[Name, str]:
    """Those that differ from most of their kind, with a sentence for each. sums: by name, the kind and the checksum,
    which is empty where there is none. Where no checksum is that of most, as with two that differ from each other,
    nobody can tell which one is right, and all of the kind are named: one that is wrong must not stay for its luck."""
    kinds: dict[Hashable, dict[Name, str]] = {}
    for name, (kind, checksum) in sums.items():
        if checksum:
            kinds.setdefault(kind, {})[name] = checksum
    found: dict[Name, str] = {}
    for same in kinds.values():
        count = Counter(same.values())
        (most, times), *others = count.most_common(2)
        if not others:
            continue
        if times == others[0][1]:
            found |= {name: f"checksum {own}, others have {_another(own, count)}" for name, own in same.items()}
        else:
            found |= {name: f"checksum {own}, most have {most}" for name, own in same.items() if own != most}
    return found


def _another(own: str, count: Counter[str]) -> str:
    return next(value for value, _ in count.most_common() if value != own) + ", and none is that of most"
