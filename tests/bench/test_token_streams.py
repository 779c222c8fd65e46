"""The longest time without a token."""

from __future__ import annotations

import pytest

from e2e.bench.token_streams import TokenStream, TokenStreams


@pytest.mark.parametrize(
    ("streams", "expected"),
    [
        ([], 0.0),
        ([TokenStream([9.0, 10.5, 11.0, 13.0, 13.1], ended=True)], 2.0),
        ([TokenStream([5.0, 10.4], ended=True)], 0.4),  # from the beginning on
        ([TokenStream([14.0, 17.0], ended=True)], 3.0),  # begun before the end
        ([TokenStream([15.5, 19.0], ended=True)], 0.0),  # begun after it
        ([TokenStream([14.0], ended=False)], 6.0),  # it still waits
        ([TokenStream([14.0], ended=True)], 0.0),
        ([TokenStream([10.0, 10.1], ended=True), TokenStream([10.0, 10.3], ended=True)], 0.3),
    ],
)
def test_the_longest_gap_of_any_client(streams: list[TokenStream], expected: float) -> None:
    found = TokenStreams(streams).longest_gap(10.0, 15.0, now=20.0)
    assert found == pytest.approx(expected)
