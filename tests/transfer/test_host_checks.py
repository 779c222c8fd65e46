"""Inf and NaN are found in every type that has them, and sums do not change when rows move."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_rollout.transfer.digests import ALGORITHMS, BLAKE2B, UnknownDigest, digest
from sglang_rollout.transfer.dtypes import DTYPES
from sglang_rollout.transfer.host_checks import CHUNK, BucketCheck, check_bucket, nonfinite, spans, word_sum
from sglang_rollout.transfer.manifest import Tensor, bucket_of


@given(st.lists(st.floats(width=16)))
def test_half_floats_as_numpy_counts_them(values: list[float]) -> None:
    array = np.array(values, np.float16)
    assert nonfinite(memoryview(array.tobytes()), "F16") == int(np.count_nonzero(~np.isfinite(array)))


@given(st.lists(st.floats(width=32)), st.sampled_from(["F32", "BF16"]))
def test_floats_as_numpy_counts_them(values: list[float], dtype: str) -> None:
    array = np.array(values, np.float32)
    if dtype == "BF16":  # the upper half of the same bits
        high = array.view(np.uint32) >> 16
        kept = (high << 16).view(np.float32)
        data, expected = high.astype(np.uint16).tobytes(), int(np.count_nonzero(~np.isfinite(kept)))
    else:
        data, expected = array.tobytes(), int(np.count_nonzero(~np.isfinite(array)))
    assert nonfinite(memoryview(data), dtype) == expected


@pytest.mark.parametrize(
    ("dtype", "bad", "good"),
    [
        ("F64", struct.pack("<d", float("nan")), struct.pack("<d", 1e308)),
        ("F8_E5M2", b"\x7c", b"\x7b"),
        ("F8_E5M2", b"\xfd", b"\xfb"),
        ("F8_E4M3", b"\xff", b"\xfe"),
        ("F8_E8M0", b"\xff", b"\xfe"),
    ],
)
def test_one_bad_value_anywhere(dtype: str, bad: bytes, good: bytes) -> None:
    count = 3 * CHUNK // len(good) + 1
    data = bytearray(good * count)
    assert nonfinite(memoryview(data), dtype) == 0
    data[-len(bad) :] = bad
    assert nonfinite(memoryview(data), dtype) == 1


@pytest.mark.parametrize("dtype", [name for name, kind in DTYPES.items() if kind.itemsize <= 2])
def test_every_value_alone_is_told_by_its_bits(dtype: str) -> None:
    kind = DTYPES[dtype]
    mask = kind.nonfinite_mask
    for bits in range(1 << 8 * kind.itemsize):
        expected = bool(mask) and bits & mask == mask
        assert nonfinite(memoryview(bits.to_bytes(kind.itemsize, "little")), dtype) == expected


@pytest.mark.parametrize("dtype", [name for name, kind in DTYPES.items() if not kind.nonfinite_mask])
def test_whole_numbers_are_always_finite(dtype: str) -> None:
    assert nonfinite(memoryview(b"\xff" * 16), dtype) == 0


def test_tensors_with_bad_values_are_named() -> None:
    bucket = bucket_of([Tensor("a", "F32", (2,)), Tensor("b", "BF16", (2,)), Tensor("c", "BF16", (0,))])
    data = struct.pack("<2f", 1, float("inf")) + b"\x80\x7f\x80\x7f"
    assert check_bucket(memoryview(data), bucket, BLAKE2B).nonfinite == {"a": 1, "b": 2}


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(0, 9))
def test_one_pass_finds_what_each_check_alone_does(lengths: list[int], seed: int) -> None:
    bucket = bucket_of([Tensor(str(number), "U8", (8 * length,)) for number, length in enumerate(lengths)])
    data = memoryview(np.random.default_rng(seed).bytes(bucket.size))
    checked = check_bucket(data, bucket, BLAKE2B)
    assert checked.digest == digest(BLAKE2B, data)
    assert checked.word_sum == word_sum(data)


@given(st.lists(st.binary(min_size=8, max_size=8)), st.randoms())
def test_moved_rows_have_the_same_sum(rows: list[bytes], random: object) -> None:
    moved = list(rows)
    random.shuffle(moved)  # type: ignore[attr-defined]
    expected = sum(int.from_bytes(row, "little") for row in rows) % (1 << 64)
    assert word_sum(memoryview(b"".join(rows))) == word_sum(memoryview(b"".join(moved))) == expected


def test_a_digest_tells_bytes_apart_and_unknown_ones_are_refused() -> None:
    for algorithm in ALGORITHMS:
        assert digest(algorithm, memoryview(b"a")) != digest(algorithm, memoryview(b"b"))
    assert digest(BLAKE2B, memoryview(b"")) == digest(BLAKE2B, memoryview(b""))
    with pytest.raises(UnknownDigest, match="'md5' cannot be computed here"):
        digest("md5", memoryview(b""))


@given(st.lists(st.integers(0, 3 * CHUNK // 2), min_size=1, max_size=5), st.integers(1, 4))
def test_bytes_that_come_span_by_span_are_checked_alike(lengths: list[int], chunks: int) -> None:
    bucket = bucket_of([Tensor(f"t{n}", "F8_E4M3", (length,)) for n, length in enumerate(lengths)])
    data = memoryview(np.random.default_rng(len(lengths)).integers(0, 256, bucket.size, dtype=np.uint8).tobytes())
    check, reached = BucketCheck(BLAKE2B), 0
    for span in spans(bucket, chunks * CHUNK):
        assert span.begin == reached
        assert 0 < span.size <= chunks * CHUNK or not span.size
        reached += span.size
        check.add(data[span.begin : reached], span)
    assert reached == bucket.size
    found = check.found()
    assert found == check_bucket(data, bucket, BLAKE2B)
    assert found.digest == digest(BLAKE2B, data)
