"""Which ways of bringing bytes between processes are tried where, and when NIXL's is another than it should be."""

from __future__ import annotations

import pytest

from bench.gpu.kernel_free import MORE_STREAMS, NIXL, PEER_COPY, _chosen, ways

TABLE = "| remote memory read by ucp_get*(multi) into cuda/GPU0 from cuda |\n| 0..inf | zero-copy | {} |\n"


@pytest.mark.parametrize(
    ("cpu", "one_gpu", "names"),
    [
        (False, True, ["PeerCopy", "NIXL"]),
        (True, True, ["Gloo", "NIXL"]),
        (True, False, ["Gloo", "NIXL"]),
        (
            False,
            False,
            [
                "PeerCopy",
                "NCCL",
                "NCCL copy engines",
                "NIXL",
                "NCCL P2P by memcpy",
                *(way.name for way in MORE_STREAMS),
            ],
        ),
    ],
)
def test_ways(cpu: bool, one_gpu: bool, names: list[str]) -> None:
    assert [way.name for way in ways(cpu, one_gpu, "folder")] == names
    assert [way.name for way in ways(cpu, one_gpu, "")] == [name for name in names if name != "NIXL"]


def test_nixl_that_does_not_read_by_copies_between_gpus_has_failed() -> None:
    assert "failed" not in _chosen(NIXL, False, TABLE.format("cuda_ipc/cuda"))
    assert "cuda_ipc" in _chosen(NIXL, False, TABLE.format("tcp/lo"))["failed"]
    assert "failed" in _chosen(NIXL, False, "")
    assert "failed" not in _chosen(NIXL, True, TABLE.format("cma/memory"))
    assert "failed" not in _chosen(PEER_COPY, False, "")
