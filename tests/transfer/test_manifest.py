"""Manifests: any mix of types in any bucket size comes back as it was, and what is wrong is named."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_rollout.transfer.comparison import differences
from sglang_rollout.transfer.dtypes import DTYPES
from sglang_rollout.transfer.manifest import Bucket, Manifest, ManifestRefused, Tensor, bucket_of, plan_buckets

TENSORS = st.lists(
    st.builds(
        Tensor,
        st.text(min_size=1, max_size=8),
        st.sampled_from(sorted(DTYPES)),
        st.lists(st.integers(0, 9), max_size=3).map(tuple),
    ),
    min_size=1,
    max_size=20,
    unique_by=lambda tensor: tensor.name,
)


@given(TENSORS, st.integers(1, 2000))
def test_buckets_hold_every_tensor_once_aligned_and_within_the_limit(tensors: list[Tensor], limit: int) -> None:
    buckets = list(plan_buckets(tensors, limit))
    assert sorted(t.name for b in buckets for t in b.tensors) == sorted(t.name for t in tensors)
    for bucket in buckets:
        assert bucket.size <= limit or len([t for t in bucket.tensors if t.size]) == 1
        end = 0
        for tensor, offset in bucket.placed():
            assert offset == end
            assert offset % DTYPES[tensor.dtype].itemsize == 0
            end = offset + tensor.size
        assert end == bucket.size


@given(TENSORS, st.integers(1, 2000), st.booleans())
def test_a_manifest_comes_back_from_json_with_its_root(tensors: list[Tensor], limit: int, alias: bool) -> None:
    aliases = {"\0alias": tensors[0].name} if alias else {}
    manifest = Manifest(tuple(plan_buckets(tensors, limit)), "blake2b-128", aliases)
    back = Manifest.from_json(manifest.to_json())
    assert back == manifest
    assert back.root == manifest.root
    assert back.tensors == {tensor.name: tensor for tensor in tensors}


@given(st.binary(max_size=200))
def test_bytes_that_are_no_manifest_are_refused(data: bytes) -> None:
    with pytest.raises(ManifestRefused):
        Manifest.from_json(data)


@given(TENSORS, st.data())
def test_a_damaged_manifest_is_refused_or_another(tensors: list[Tensor], data: st.DataObject) -> None:
    manifest = Manifest(tuple(plan_buckets(tensors, 100)), "blake2b-128")
    raw = bytearray(manifest.to_json())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 6))
    with contextlib.suppress(ManifestRefused):
        assert Manifest.from_json(bytes(raw)).root != manifest.root or json.loads(raw) == json.loads(manifest.to_json())


def test_the_root_names_the_bytes_and_the_layout_only_the_shapes() -> None:
    tensor = Tensor("a", "BF16", (2,))
    one, two = (Manifest((Bucket((tensor,), digest),), "x") for digest in ("1", "2"))
    assert one.root != two.root
    assert one.layout == two.layout


@pytest.mark.parametrize(
    ("tensors", "aliases", "sentence"),
    [
        ([], {}, "there are no tensors"),
        ([("a", "BF16", [1]), ("a", "BF16", [1])], {}, "tensor a is there twice"),
        ([("a", "F4", [1])], {}, "tensor a is of type 'F4'"),
        ([("a", "BF16", [-1])], {}, "tensor a has shape"),
        ([("a", "BF16", [True])], {}, "tensor a has shape"),
        ([("a", "BF16", [1 << 40, 1 << 40])], {}, "more than the limit"),
        ([("a", "BF16", [1]), ("b", "F32", [1])], {}, "tensor b stands behind one of smaller items"),
        ([("", "BF16", [1])], {}, "is not a string of 1 to"),
        ([("a", "BF16", [1])], {"a": "a"}, "tensor a is sent and also called an alias"),
        ([("a", "BF16", [1])], {"b": "c"}, "alias b stands for c"),
    ],
)
def test_what_is_wrong_is_named(tensors: list[object], aliases: dict[str, str], sentence: str) -> None:
    text = {"format": 1, "algorithm": "x", "aliases": aliases, "buckets": [{"digest": "", "tensors": tensors}]}
    with pytest.raises(ManifestRefused, match=sentence):
        Manifest.from_json(json.dumps(text).encode())


def test_differences_name_the_tensors() -> None:
    running = {name: Tensor(name, "BF16", (2, 2)) for name in ("a", "b", "c", "lm_head.weight")}
    offered = {
        "a": Tensor("a", "BF16", (2, 3)),
        "b": Tensor("b", "F32", (2, 2)),
        "d": Tensor("d", "BF16", (1,)),
    }
    assert differences(offered, running, optional=["lm_head.weight"]) == [
        "wrong types or shapes in the weights: a is [2, 3] BF16, the running model has [2, 2] BF16; "
        "b is [2, 2] F32, the running model has [2, 2] BF16",
        "the weights lack c, which the running model has",
        "the weights hold d, which the running model does not have",
    ]
    assert differences(running, running) == []


def test_many_names_are_counted() -> None:
    tensors = {f"t{n}": Tensor(f"t{n}", "U8", (1,)) for n in range(9)}
    assert differences({}, tensors) == ["the weights lack t0, t1, t2 and 6 more, which the running model has"]


def test_a_bucket_keeps_the_given_order_within_a_size() -> None:
    words = [Tensor("a", "U8", (1,)), Tensor("b", "F32", (1,)), Tensor("c", "I32", (1,)), Tensor("d", "U8", (1,))]
    assert [tensor.name for tensor in bucket_of(words).tensors] == ["b", "c", "a", "d"]
