"""What clients got from a fleet, and the rules that no schedule of faults may break."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

# SGLang against transformers differs by 0.004 on these models, two versions by whole units.
FINGERPRINT_TOLERANCE = 0.25


@dataclass(frozen=True)
class Answer:
    """One request to the router and what came of it. sent, received: monotonic seconds. status 0: no HTTP answer.
    version: the label in the answer. spans: the versions of its tokens in turn, as SGLang tells them.
    cached_tokens: of the prompt, whose KV cache was there. prompt_logprobs: of the prompt's tokens, computed by the
    weights that served; None: not asked for."""

    sent: float
    received: float
    status: int
    error: str = ""
    version: str = ""
    spans: tuple[str, ...] = ()
    text: str = ""
    cached_tokens: int = 0
    prompt_logprobs: tuple[float, ...] | None = None

    @property
    def ok(self) -> bool:
        return self.status == 200 and not self.error

    @property
    def seconds(self) -> float:
        return self.received - self.sent


def failures(answers: Iterable[Answer]) -> list[str]:
    """What went wrong, each kind once with its count."""
    counted = Counter(f"{one.status} {one.error}".strip()[:300] for one in answers if not one.ok)
    return [f"{count} x {what}" for what, count in counted.most_common()]


def versions(answers: Iterable[Answer]) -> dict[str, int]:
    """How many answers each version gave."""
    return dict(Counter(one.version for one in answers if one.ok))


def other_than(answers: Iterable[Answer], allowed: Collection[str]) -> list[Answer]:
    """Answers of a version that was not allowed."""
    return [one for one in answers if one.ok and one.version not in allowed]


def side_by_side(answers: Iterable[Answer], order: Sequence[str]) -> list[tuple[Answer, Answer]]:
    """Pairs that show two versions serving at once: an older version's answer to a request that was sent after a
    newer version had already answered one. order: versions, oldest first."""
    known = sorted((one for one in answers if one.ok and one.version in order), key=lambda one: one.received)
    pairs = []
    for newer_rank in range(1, len(order)):
        first = next((one for one in known if order.index(one.version) >= newer_rank), None)
        if first is None:
            continue
        pairs += [(first, one) for one in known if one.sent > first.received and order.index(one.version) < newer_rank]
    return pairs


def torn(answers: Iterable[Answer], order: Sequence[str]) -> list[Answer]:
    """Answers whose tokens came from versions in another order than the fleet's, or that end with another version than
    their label. A paused answer may go on with the next version: its spans say so."""

    def told(one: Answer) -> bool:
        ranks = [order.index(version) for version in one.spans if version in order]
        return len(ranks) == len(one.spans) and ranks == sorted(ranks) and one.spans[-1:] in ((), (one.version,))

    return [one for one in answers if one.ok and not told(one)]


def mislabelled(answers: Iterable[Answer], fingerprints: Mapping[str, Sequence[float]]) -> list[Answer]:
    """Answers whose label differs from the weights that computed them. fingerprints: the prompt's log probabilities
    under each version's checkpoint, computed without SGLang. Answers that span versions are left out: their prompt
    may have been computed by any of them."""
    return [
        one
        for one in answers
        if one.ok
        and one.spans == (one.version,)
        and one.version in fingerprints
        and one.prompt_logprobs is not None
        and not _matches(one.prompt_logprobs, fingerprints[one.version])
    ]


def _matches(found: Sequence[float], expected: Sequence[float]) -> bool:
    return len(found) == len(expected) and all(
        abs(a - b) <= FINGERPRINT_TOLERANCE for a, b in zip(found, expected, strict=True)
    )
