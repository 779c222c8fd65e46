"""Into which parts one copy is divided."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_rollout.transfer.transports.peer_copy import LEAST_PART, STREAMS, _parts


@given(st.one_of(st.integers(1, 1 << 20), st.integers(1, 8 << 30)))
def test_parts_are_the_whole_and_few(size: int) -> None:
    parts = _parts(size)
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == size
    assert len(parts) <= STREAMS
    assert len(parts) == 1 or all(part.stop - part.start >= LEAST_PART // 2 for part in parts)
