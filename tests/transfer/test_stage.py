"""The stage: whole and verified or nothing, in shared memory that outlives who wrote it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_rollout.transfer.digests import BLAKE2B, digest
from sglang_rollout.transfer.manifest import Bucket, Manifest, Tensor, bucket_of, plan_buckets
from sglang_rollout.transfer.stage import BytesRefused, Stage, reserve_host
from sglang_rollout.transfer.stage_index import (
    ALIGNMENT,
    INDEX,
    Placement,
    Region,
    StageUnusable,
    read_index,
    read_manifest,
    region_bytes,
    slot_bytes,
)

from .weights import Weights, some_weights

SLOT = 1 << 16


def fill(
    stage: Stage, slot: str, weights: Weights, version: str, *, bucket_bytes: int = 300, root: str = ""
) -> Manifest:
    writer = stage.write(slot, BLAKE2B)
    for bucket in plan_buckets([tensor for tensor, _ in weights.values()], bucket_bytes):
        with writer.fill(writer.place(bucket)) as view:
            for tensor, offset in bucket.placed():
                view[offset : offset + tensor.size] = weights[tensor.name][1]
    return writer.seal(version, root=root)


def staged_bytes(folder: Path, root: str) -> dict[str, bytes]:
    """Read as the engine does: by the index alone."""
    slot = read_index(folder).holding(root)
    data = [(folder / region.path).read_bytes() for region in slot.regions]
    placement = Placement(slot.regions)
    found = {}
    for bucket in read_manifest(folder, slot).buckets:
        region, begin = placement.place(bucket)
        for tensor, offset in bucket.placed():
            found[tensor.name] = data[region][begin + offset : begin + offset + tensor.size]
    return found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(st.integers(1, 3000), st.integers(0, 100))
def test_what_is_staged_is_what_was_given(tmp_path: Path, bucket_bytes: int, seed: int) -> None:
    weights = some_weights(seed)
    stage = reserve_host(tmp_path, SLOT, 1)
    manifest = fill(stage, "a", weights, "v1", bucket_bytes=bucket_bytes)
    assert staged_bytes(tmp_path, manifest.root) == {name: data for name, (_, data) in weights.items()}
    assert slot_bytes(manifest) <= SLOT


def test_two_versions_side_by_side_survive_their_writer(tmp_path: Path) -> None:
    stage = reserve_host(tmp_path, SLOT, 2)
    one = fill(stage, stage.free_slot("").name, some_weights(1), "v1")
    two = fill(stage, stage.free_slot(one.root).name, some_weights(2), "v2")
    assert one.layout == two.layout
    later = reserve_host(tmp_path, SLOT, 2)
    assert later.holds(one.root)
    assert later.holds(two.root)
    assert later.free_slot(two.root).sealed == read_index(tmp_path).holding(one.root).sealed
    assert staged_bytes(tmp_path, two.root)["embed.weight"] == some_weights(2)["embed.weight"][1]


def test_a_slot_that_is_being_written_holds_nothing(tmp_path: Path) -> None:
    stage = reserve_host(tmp_path, SLOT, 1)
    root = fill(stage, "a", some_weights(1), "v1").root
    stage.write("a", BLAKE2B)
    with pytest.raises(StageUnusable, match="the stage holds nothing"):
        read_index(tmp_path).holding(root)
    assert not Stage(tmp_path).holds(root)


def test_another_size_starts_anew(tmp_path: Path) -> None:
    root = fill(reserve_host(tmp_path, SLOT, 2), "b", some_weights(), "v1").root
    assert not reserve_host(tmp_path, 2 * SLOT, 1).holds(root)
    assert sorted(path.name for path in tmp_path.glob("*.bytes")) == ["a.bytes"]


def test_no_room_is_said_with_numbers_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, begin: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StageUnusable, match=f"no room for a stage of {SLOT} bytes .* raise engine.sharedMemorySize"):
        reserve_host(tmp_path, SLOT, 2)
    assert list(tmp_path.iterdir()) == []


def test_reserved_pages_are_there(tmp_path: Path) -> None:
    reserve_host(tmp_path, 8 << 20, 1)
    assert os.stat(tmp_path / "a.bytes").st_blocks * 512 >= 8 << 20


def test_too_many_bytes_for_the_slot(tmp_path: Path) -> None:
    stage = reserve_host(tmp_path, 512, 1)
    with pytest.raises(StageUnusable, match="does not fit: 512 of the slot's 512 bytes are taken"):
        fill(stage, "a", some_weights(), "v1", bucket_bytes=400)


def test_bytes_with_another_digest_name_the_tensors(tmp_path: Path) -> None:
    stage = reserve_host(tmp_path, SLOT, 1)
    tensor = Tensor("a", "U8", (4,))
    announced = Bucket((tensor,), digest(BLAKE2B, memoryview(b"good")))
    writer = stage.write("a", BLAKE2B)
    number = writer.place(announced)
    with pytest.raises(BytesRefused, match="bucket 0, of tensors a, has digest"), writer.fill(number) as view:
        view[:] = b"evil"
    with pytest.raises(BytesRefused, match="1 of 1 buckets have not come"):
        writer.seal("v1")
    with writer.fill(number) as view:
        view[:] = b"good"
    with pytest.raises(BytesRefused, match="announced with 0000"):
        writer.seal("v1", root="0" * 64)
    writer.seal("v1")


def test_inf_and_nan_are_refused_unless_allowed(tmp_path: Path) -> None:
    stage = reserve_host(tmp_path, SLOT, 1)
    bucket = bucket_of([Tensor("fine", "BF16", (2,)), Tensor("broken", "BF16", (2,))])
    data = b"\0\0\0\0\xc0\x7f\0\0"
    sentence = r"Inf or NaN, of which the engine would die, in tensors broken \(1\)"
    writer = stage.write("a", BLAKE2B)
    number = writer.place(bucket)
    with pytest.raises(BytesRefused, match=sentence), writer.fill(number) as view:
        view[:] = data
    writer = stage.write("a", BLAKE2B, allow_nonfinite=True)
    with writer.fill(writer.place(bucket)) as view:
        view[:] = data
    writer.seal("v1")
    assert writer.nonfinite == {"broken": 1}


def test_a_changed_manifest_file_is_noticed(tmp_path: Path) -> None:
    root = fill(reserve_host(tmp_path, SLOT, 1), "a", some_weights(), "v1").root
    slot = read_index(tmp_path).holding(root)
    path = tmp_path / slot.manifest_file
    path.write_bytes(path.read_bytes().replace(b"embed.weight", b"embed.weighs"))
    with pytest.raises(StageUnusable, match=r"has digest .* the index says"):
        read_manifest(tmp_path, slot)


def test_there_is_no_stage(tmp_path: Path) -> None:
    with pytest.raises(StageUnusable, match="there is no stage in"):
        Stage(tmp_path)
    (tmp_path / INDEX).write_text("{}")
    with pytest.raises(StageUnusable, match="cannot be read"):
        Stage(tmp_path)


@given(st.lists(st.integers(0, 4000), min_size=1, max_size=30), st.integers(1, 4))
def test_buckets_spread_over_regions_without_overlap(sizes: list[int], count: int) -> None:
    regions = [Region(1 << 17, path=str(number)) for number in range(count)]
    placement = Placement(regions)
    taken: list[tuple[int, int, int]] = []
    for size in sizes:
        region, offset = placement.place(Bucket((Tensor("t", "U8", (size,)),)))
        assert offset % 512 == 0
        assert offset + size <= regions[region].size
        assert all(region != r or offset >= end or offset + size <= begin for r, begin, end in taken)
        taken.append((region, offset, offset + size))
    used = [sum(end - begin for r, begin, end in taken if r == number) for number in range(count)]
    assert max(used) - min(used) <= max(sizes) + 512 * len(sizes)


def test_what_was_begun_before_the_stage_was_made_anew_is_not_sealed_in_it(tmp_path: Path) -> None:
    """An engine with another checkpoint starts while the last one's next weights are still being read."""
    weights = some_weights()
    writer = reserve_host(tmp_path, SLOT, 1).write("a", BLAKE2B)
    for bucket in plan_buckets([tensor for tensor, _ in weights.values()], 300):
        with writer.fill(writer.place(bucket)) as view:
            for tensor, offset in bucket.placed():
                view[offset : offset + tensor.size] = weights[tensor.name][1]
    reserve_host(tmp_path, SLOT * 2, 1)
    with pytest.raises(StageUnusable, match="made anew"):
        writer.seal("v1")
    assert not any(slot.sealed for slot in read_index(tmp_path).slots)


def test_a_process_that_keeps_the_stage_open_writes_into_the_one_that_is_there_now(tmp_path: Path) -> None:
    weights = some_weights()
    kept_open = reserve_host(tmp_path, SLOT, 1)
    fill(kept_open, "a", weights, "v1")
    reserve_host(tmp_path, SLOT * 2, 1)
    manifest = fill(kept_open, "a", weights, "v2")
    assert staged_bytes(tmp_path, manifest.root) == {name: data for name, (_, data) in weights.items()}


def test_a_stage_may_be_closed_and_found_again_while_a_thread_still_writes(tmp_path: Path) -> None:
    stage = reserve_host(tmp_path, SLOT, 1)
    writer = stage.write("a", BLAKE2B)
    bucket = bucket_of([Tensor("a", "U8", (300,))])
    with writer.fill(writer.place(bucket)) as view:
        stage.close()
        again = reserve_host(tmp_path, SLOT, 1)
        view[:] = b"x" * 300
    assert not again.holds(writer.seal("v1").root)
    assert read_index(tmp_path).slots[0].sealed is not None


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=40), st.integers(1, 8), st.integers(1, 20000))
def test_over_several_gpus_any_buckets_of_the_size_that_is_promised_fit(
    sizes: list[int], gpus: int, bucket_bytes: int
) -> None:
    tensors = [Tensor(f"t{number}", "U8", (size,)) for number, size in enumerate(sizes)]
    largest = max(bucket_bytes, *sizes)
    room = region_bytes(sum(sizes) + ALIGNMENT * (len(sizes) + 1), gpus, largest)
    placement = Placement([Region(room, gpu=f"GPU-{number}", handle="00") for number in range(gpus)])
    for bucket in plan_buckets(tensors, bucket_bytes):
        placement.place(bucket)


def test_a_bucket_that_lies_on_no_gpu_says_what_to_send_instead() -> None:
    placement = Placement([Region(1000, gpu=f"GPU-{number}", handle="00") for number in range(2)])
    placement.place(Bucket((Tensor("a", "U8", (300,)),)))
    with pytest.raises(StageUnusable, match=r"1000 are the most that are left on one of its 2 GPUs: send smaller"):
        placement.place(Bucket((Tensor("b", "U8", (1100,)),)))
    with pytest.raises(StageUnusable, match="larger than those that the engine started from"):
        placement.place(Bucket((Tensor("c", "U8", (3000,)),)))
