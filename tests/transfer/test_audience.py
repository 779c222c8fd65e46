"""What an agent says is kept only as long as somebody waits for it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from sglang_rollout.transfer.audience import Audience, MemberGone
from sglang_rollout.transfer.session import Hello, LinkLost, Message, Ready, Took


class SaidLink:
    """An agent that says these words, and goes."""

    def __init__(self, words: list[Message]) -> None:
        self._words = iter(words)

    async def receive(self, timeout: float) -> Message:
        for word in self._words:
            return word
        raise LinkLost("it has gone")


async def heard(audience: Audience, *words: Message) -> Any:
    member = audience.add(SaidLink(list(words)), Hello("t", "v2", "p0"))  # type: ignore[arg-type]
    with pytest.raises(MemberGone):
        await audience.until(lambda _: False, 5.0, "go on")
    return member


async def test_only_answers_for_buckets_under_way_are_kept() -> None:
    audience = Audience(time.monotonic() + 10)
    audience.group = "g"
    audience.under_way(3)
    said = [word for number in range(1000) for word in (Ready(number, "g"), Took(number, "g"))]
    member = await heard(audience, Took(3, "another"), *said)
    assert (member.ready, member.took) == ({3}, {3})
    audience.taken(3)
    assert (member.ready, member.took) == (set(), set())
