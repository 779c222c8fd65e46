"""Exported GPU memory: never two buckets in one piece, never freed twice or while it is used, whatever breaks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_rollout.transfer.transports import TransportBroken
from sglang_rollout.transfer.transports.exported import ROUND, Exported, ExportedBuckets, ExportPool


class FakeDriver:
    """Refuses what the real one does: freeing what is not there."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self._next = ROUND

    def allocate(self, size: int) -> int:
        address, self._next = self._next, self._next + size
        self.held[address] = size
        return address

    def free(self, address: int) -> None:
        assert address in self.held, "CUDA_ERROR_INVALID_VALUE"
        del self.held[address]

    def export(self, address: int) -> str:
        assert address in self.held
        return f"handle of {address}"


def overlap(taken: dict[int, Exported], probe: Exported) -> bool:
    addresses = [one.address for one in taken.values()] + [probe.address]
    return len(set(addresses)) < len(addresses)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("take"), st.integers(0, 9), st.integers(1, 5 * ROUND)),
            st.tuples(st.just("free"), st.integers(0, 9), st.just(0)),
            st.tuples(st.just("abort"), st.integers(1, 3), st.just(0)),
        ),
        max_size=60,
    )
)
def test_whatever_breaks_memory_has_one_use(steps: list[tuple[str, int, int]]) -> None:
    driver = FakeDriver()
    pool = ExportPool(driver)
    buckets, taken = ExportedBuckets(pool, 1), dict[int, Exported]()
    for what, number, size in steps:
        if what == "take" and number not in taken:
            taken[number] = buckets.take(number, size)
            assert taken[number].size >= size
            handle, closing = buckets.handles(number)
            assert handle == taken[number].handle
            assert not {one.handle for one in taken.values()} & set(closing)
        elif what == "free":
            buckets.free(number)
            taken.pop(number, None)
        elif what == "abort":
            for _ in range(number):  # more than one says so of a group that is lost
                buckets.abort()
            with pytest.raises(TransportBroken):
                buckets.take(99, 1)
            for old in list(taken):
                buckets.free(old)
                with pytest.raises(TransportBroken):
                    buckets.handles(old)
            buckets, taken = ExportedBuckets(pool, 1), {}
        assert not overlap(taken, buckets.probe)
        assert all(one.address in driver.held for one in (*taken.values(), buckets.probe))


def test_memory_is_used_again_and_what_is_too_small_does_not_pile_up() -> None:
    driver = FakeDriver()
    buckets = ExportedBuckets(ExportPool(driver), 1)
    for round_ in range(5):
        for number in range(3):
            buckets.take(number, (round_ + 1) * ROUND)
        for number in range(3):
            buckets.free(number)
    assert len(driver.held) == 4  # three buckets and the probe
    before = set(driver.held)
    buckets.take(0, ROUND)
    assert set(driver.held) == before
