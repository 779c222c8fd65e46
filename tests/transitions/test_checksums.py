"""Which engines' checksums are not to be trusted, in tables."""

from __future__ import annotations

import pytest

from sglang_rollout.transitions.checksums import unlike


@pytest.mark.parametrize(
    ("sums", "odd"),
    [
        ("", ""),
        ("a", ""),
        ("aa", ""),
        ("aab", "2"),
        ("baa", "0"),
        ("ab", "01"),
        ("ba", "01"),
        ("abc", "012"),
        ("aabb", "0123"),
        ("aabbc", "01234"),
        ("aabc", "23"),
        ("a-", ""),
        ("ab-", "01"),
    ],
)
def test_who_is_not_like_most(sums: str, odd: str) -> None:
    """One engine a letter, which is its checksum; "-": it has none."""
    told = unlike({index: ("tp1", "" if sum_ == "-" else sum_) for index, sum_ in enumerate(sums)})
    assert sorted(told) == [int(index) for index in odd]


def test_only_sums_of_one_kind_are_held_against_each_other() -> None:
    assert unlike({0: ("v1", "a"), 1: ("v2", "b"), 2: ("v1", "a"), 3: ("v2", "b")}) == {}
    assert set(unlike({0: ("v1", "a"), 1: ("v2", "b"), 2: ("v1", "c"), 3: ("v2", "b")})) == {0, 2}


def test_the_sentences_say_what_others_have() -> None:
    assert unlike(dict(enumerate([("k", "a"), ("k", "b"), ("k", "b")]))) == {0: "checksum a, most have b"}
    assert unlike(dict(enumerate([("k", "a"), ("k", "b")])))[1] == "checksum b, others have a, and none is that of most"
