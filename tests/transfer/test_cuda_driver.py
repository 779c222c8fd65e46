"""Talking to the CUDA driver, with one that is played: what is asked of it, and what its errors become."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_rollout.transfer import cuda_driver, regions
from sglang_rollout.transfer.cuda_driver import CudaDriver, CudaError, gpu_name, ordinal_at
from sglang_rollout.transfer.regions import DeviceRegion
from sglang_rollout.transfer.stage_index import Region, device_index, read_index

UUID = bytes(range(16))


class PlayedDriver:
    """Device memory is host memory here. Every call returns 0, or `fails[name]`."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails: dict[str, int] = {}
        self.memory = ctypes.create_string_buffer(4096)
        self.before = 0  # bytes of it that were given out

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == "cuDeviceGetUuid_v2":
                arguments[0]._obj.bytes[:] = UUID
            if name in ("cuMemAlloc_v2", "cuIpcOpenMemHandle_v2"):
                arguments[0]._obj.value = ctypes.addressof(self.memory) + self.before
            if name == "cuMemcpyHtoD_v2":
                ctypes.memmove(arguments[0].value, arguments[1].value, arguments[2].value)
            if name == "cuMemcpyDtoH_v2":
                ctypes.memmove(arguments[0].value, arguments[1].value, arguments[2].value)
            if name == "cuGetErrorName":
                arguments[1]._obj.value = b"CUDA_ERROR_OUT_OF_MEMORY"
            return self.fails.get(name, 0)

        return call


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> PlayedDriver:
    driver = PlayedDriver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    return driver


def test_memory_is_given_out_and_opened(played: PlayedDriver) -> None:
    driver = CudaDriver()
    assert driver.gpu == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
    handle = driver.export(driver.allocate(4096))
    assert len(bytes.fromhex(handle)) == cuda_driver.HANDLE_BYTES
    region = DeviceRegion(driver, handle)
    with region.window(16, 4) as view:
        view[:] = b"abcd"
    assert played.memory.raw[16:20] == b"abcd"
    region.close()
    assert played.calls[-1] == "cuIpcCloseMemHandle"


def test_nothing_is_copied_when_filling_fails(played: PlayedDriver) -> None:
    region = DeviceRegion(CudaDriver(), "00" * 64)
    with pytest.raises(ZeroDivisionError), region.window(0, 4):
        raise ZeroDivisionError
    assert "cuMemcpyHtoD_v2" not in played.calls


def test_host_buffers_are_pinned_once_and_used_again(played: PlayedDriver) -> None:
    region = DeviceRegion(CudaDriver(), "00" * 64)
    for begin in range(3):
        with region.window(begin * 8, 4) as view:
            view[:] = b"%04d" % begin
        with region.look(begin * 8, 4) as seen:
            assert bytes(seen) == b"%04d" % begin
    assert played.calls.count("cuMemHostRegister_v2") == 1
    with region.look(0, 4), region.look(8, 4):
        region.close()
        assert "cuMemHostUnregister" not in played.calls
    assert played.calls.count("cuMemHostRegister_v2") == played.calls.count("cuMemHostUnregister") == 2


def test_memory_that_cannot_be_pinned_serves_too(played: PlayedDriver) -> None:
    played.fails["cuMemHostRegister_v2"] = 2
    region = DeviceRegion(CudaDriver(), "00" * 64)
    with region.window(0, 4) as view:
        view[:] = b"abcd"
    with region.look(0, 4) as seen:
        assert bytes(seen) == b"abcd"
    region.close()
    assert "cuMemHostUnregister" not in played.calls


def test_a_window_larger_than_a_pinned_buffer(played: PlayedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "PIECE", 64)
    region = DeviceRegion(CudaDriver(), "00" * 64)
    with region.window(0, 65) as view:
        view[:] = b"x" * 65
    assert played.memory.raw[:66] == b"x" * 65 + bytes(1)
    assert "cuMemHostRegister_v2" not in played.calls


def test_the_driver_s_own_word_is_told(played: PlayedDriver) -> None:
    played.fails["cuMemAlloc_v2"] = 2
    with pytest.raises(CudaError, match=r"cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
        CudaDriver().allocate(1)


def test_a_handle_of_another_length(played: PlayedDriver) -> None:
    with pytest.raises(CudaError, match="an IPC handle has 64 bytes, this one 2"):
        CudaDriver().open("abcd")


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(CudaError, match="there is no CUDA driver here"):
        CudaDriver()


def test_the_names_of_gpus() -> None:
    assert gpu_name(UUID) == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"


def test_a_stage_over_two_gpus_in_the_index(tmp_path: Path) -> None:
    slots = [[Region(1024, gpu=f"GPU-{n}", handle="00") for n in range(2)] for _ in range(2)]
    device_index(tmp_path / "new", slots)
    index = read_index(tmp_path / "new")
    assert [slot.name for slot in index.slots] == ["a", "b"]
    assert [list(slot.regions) for slot in index.slots] == slots


def test_the_holder_says_what_it_could_not_reserve(tmp_path: Path) -> None:
    """Here without a GPU, or with one of less memory than asked for."""
    command = [sys.executable, "-m", "sglang_rollout.transfer.device_holder", "--folder", str(tmp_path)]
    run = subprocess.run(
        [*command, "--bytes", str(1 << 50)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert run.returncode == 1
    assert run.stderr.startswith(f"no stage of 1 x {1 << 50} bytes on each of GPUs 0: ")
    assert list(tmp_path.iterdir()) == []


def test_memory_counts_for_the_gpu_for_which_it_was_opened(
    played: PlayedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_driver, "_mapped", cuda_driver._Mapped())
    first, second = CudaDriver(0), CudaDriver(1)
    here = first.allocate(1024)
    played.before = 1024
    there = second.open("00" * cuda_driver.HANDLE_BYTES)
    assert [ordinal_at(address) for address in (here, here + 1023, there, there + 9)] == [0, 0, 1, 1]
    first.free(here)
    assert ordinal_at(there) == 1
    with pytest.raises(CudaError, match="was allocated or opened"):
        ordinal_at(here)
    second.close(there)
    with pytest.raises(CudaError, match="was allocated or opened"):
        ordinal_at(there)
