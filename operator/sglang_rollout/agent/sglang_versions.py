"""What differs between the releases of SGLang that are driven, one row each. A release without a row of its own behaves
as the newest row that is not newer than itself; adding one is adding a row."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from sglang_rollout.protocol.memory import MemoryTag

_NUMBERS = re.compile(r"(\d+)\.(\d+)\.(\d+)")

# SGLang's names of the tags of /release_memory_occupation (srt/constants.py).
_MEMORY_TAGS = {MemoryTag.WEIGHTS: "weights", MemoryTag.KV_CACHE: "kv_cache", MemoryTag.CUDA_GRAPH: "cuda_graph"}


class UnsupportedRelease(Exception):
    """A release that is older than the oldest row; the sentence says what to use instead."""


@dataclass(frozen=True)
class Release:
    """One row.

    cheap_fence: /weights_checker takes skip_tensor_list, so that it can wait for the devices without reading a weight
    (0.5.23). Where it cannot, a move that asks for InPlace pauses by Retract, which drains the step in flight.
    flushes_queued: /flush_cache under a retract pause does not mind queued requests (0.5.23). Where it does (0.5.17
    answers 400), a flush under load needs pauseMode Abort.
    weight_session: updates by tensor are made between /begin_weight_update and /end_weight_update (0.5.23), routes
    that 0.5.17 does not have.
    memory_tags: names of what can be released.

    Both lack a way to tell what is released. /ready, which 0.5.17 lacks, is added by engine/serve.py.
    """

    since: tuple[int, int, int]
    cheap_fence: bool
    flushes_queued: bool
    weight_session: bool
    memory_tags: Mapping[MemoryTag, str] = field(default_factory=lambda: _MEMORY_TAGS)

    def __str__(self) -> str:
        return ".".join(map(str, self.since))


RELEASES = (
    Release((0, 5, 17), cheap_fence=False, flushes_queued=False, weight_session=False),
    Release((0, 5, 23), cheap_fence=True, flushes_queued=True, weight_session=True),
)
OLDEST, NEWEST = RELEASES[0], RELEASES[-1]


def release_of(version: str) -> Release:
    """The row for SGLang's version as it writes it. One that names no release (0.0.0.dev of a build from source,
    an empty one) is taken for the newest. Raises UnsupportedRelease."""
    found = _NUMBERS.match(version)
    numbers = (int(found[1]), int(found[2]), int(found[3])) if found else (0, 0, 0)
    if numbers == (0, 0, 0):
        return NEWEST
    rows = [row for row in RELEASES if row.since <= numbers]
    if not rows:
        raise UnsupportedRelease(
            f"SGLang {version} is older than {OLDEST}, the oldest release that can be driven: use a newer engine.image"
        )
    return rows[-1]
