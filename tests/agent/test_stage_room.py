"""How much room is reserved for staged weights, and which slot is written next."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_rollout.agent import stage_room
from sglang_rollout.agent.checkpoint import Checkpoint
from sglang_rollout.agent.memory_limit import MemoryLimit, memory_limit
from sglang_rollout.agent.settings import StageSettings
from sglang_rollout.agent.stage_room import PAGE, StageRoom, room_for
from sglang_rollout.protocol import pod
from sglang_rollout.transfer.digests import BLAKE2B
from sglang_rollout.transfer.manifest import Bucket, Manifest, Tensor, bucket_of, plan_buckets
from sglang_rollout.transfer.stage_index import ENV_FOLDER, read_running, slot_bytes

TENSORS = [Tensor(f"t{n}", "BF16", (n + 1, 3)) for n in range(40)]
EMBEDDINGS = Tensor("model.embed_tokens.weight", "BF16", (1 << 20, 2))


@pytest.fixture
def room(tmp_path: Path) -> StageRoom:
    made = StageRoom(StageSettings("Host", 2, 4096, tmp_path / "stage"))
    made.reserve(Checkpoint(TENSORS))
    assert made.stage is not None
    return made


def fill(room: StageRoom, slot: str, version: str, value: int) -> str:
    assert room.stage is not None
    writer = room.stage.write(slot, BLAKE2B)
    with writer.fill(writer.place(bucket_of(TENSORS))) as view:
        view[:] = bytes([value]) * len(view)
    return writer.seal(version).root


@pytest.mark.parametrize("bucket_bytes", [1, 7, 100, 1 << 30])
def test_a_slot_takes_any_division_into_buckets(bucket_bytes: int) -> None:
    buckets = tuple(Bucket(bucket.tensors, "0") for bucket in plan_buckets(TENSORS, bucket_bytes))
    assert slot_bytes(Manifest(buckets, BLAKE2B)) <= room_for(Checkpoint(TENSORS))


def test_the_loader_is_told_what_the_engine_starts_from(room: StageRoom) -> None:
    told = read_running(room.folder)
    assert told is not None
    assert sorted(told.tensors.values(), key=str) == sorted(TENSORS, key=str)
    room.reserve(Checkpoint([EMBEDDINGS]))
    again = read_running(room.folder)
    assert again is not None
    assert list(again.tensors) == [EMBEDDINGS.name]


def test_a_tied_output_layer_may_come_besides() -> None:
    untied = room_for(Checkpoint([*TENSORS, EMBEDDINGS]))
    tied = room_for(Checkpoint([*TENSORS, EMBEDDINGS], {"tie_word_embeddings": True}))
    assert tied - untied in (EMBEDDINGS.size, EMBEDDINGS.size + PAGE)


def test_the_slot_that_is_served_is_written_last_and_one_that_is_needed_never(room: StageRoom) -> None:
    assert room.slot_to_write("", []) == "a"
    first = fill(room, "a", "1", 1)
    assert room.slot_to_write(first, []) == "b"
    second = fill(room, "b", "2", 2)
    assert room.slot_to_write(first, []) == "b"
    assert room.slot_to_write(second, []) == "a"
    assert room.slot_to_write(first, [second]) == "a"
    assert room.slot_to_write("", [first, second]) == ""


def test_what_is_staged_outlives_the_agent_and_not_another_model(room: StageRoom, tmp_path: Path) -> None:
    root = fill(room, "a", "1", 1)
    settings = StageSettings("Host", 2, 4096, tmp_path / "stage")
    again = StageRoom(settings)
    assert again.problem == ""
    assert again.holds(root)
    again.reserve(Checkpoint(TENSORS))
    assert [one.version for one in again.report().held] == ["1"]
    again.reserve(Checkpoint([*TENSORS, EMBEDDINGS]))
    assert again.report().held == []


def test_what_does_not_fit_says_what_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_room, "LEFT_BYTES", 1 << 60)
    monkeypatch.setattr(stage_room, "SHARE_LEFT", 1)
    made = StageRoom(StageSettings("Host", 2, 4096, tmp_path / "stage"))
    made.reserve(Checkpoint([EMBEDDINGS]))
    assert made.stage is None
    assert made.problem.startswith("a stage of 6Mi x 2 versions does not fit into the pod's shared memory of ")
    assert "agent.staging.medium to None" in made.problem


def test_an_agent_that_would_be_killed_for_it_says_what_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_room, "memory_limit", lambda: MemoryLimit(512 << 20, 100 << 20))
    made = StageRoom(StageSettings("Host", 1, 4096, tmp_path / "stage"))
    made.reserve(Checkpoint([EMBEDDINGS]))
    assert made.problem == (
        "a stage of 6Mi counts as memory of the agent, whose limit is 512Mi: set the memory in agent.resources.limits "
        "to 618Mi, or agent.staging.medium to None"
    )


def test_the_memory_that_is_left_is_read_from_the_cgroup(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) is None
    for name, text in (
        ("memory.max", "1000"),
        ("memory.current", "900\n"),
        ("memory.stat", "anon 5\nactive_file 100\ninactive_file 200"),
    ):
        (tmp_path / name).write_text(text)
    assert memory_limit(tmp_path) == MemoryLimit(1000, 600)
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_limit(tmp_path) is None


def test_no_stage_is_no_fault(tmp_path: Path) -> None:
    made = StageRoom(StageSettings("None", 1, 4096, tmp_path / "stage"))
    made.reserve(Checkpoint(TENSORS))
    assert (made.wanted, made.stage, made.report().held) == (False, None, [])
    assert not (tmp_path / "stage").exists()


def test_the_pod_s_environment(tmp_path: Path) -> None:
    words = {pod.ENV_STAGE_MEDIUM: "Host", pod.ENV_STAGE_VERSIONS: "2", ENV_FOLDER: str(tmp_path)}
    assert StageSettings.read(words) == StageSettings("Host", 2, 1 << 30, tmp_path)
    assert StageSettings.read({}).medium == "None"
    with pytest.raises(ValueError, match="must be Host, Device or None"):
        StageSettings.read({pod.ENV_STAGE_MEDIUM: "Disk"})
