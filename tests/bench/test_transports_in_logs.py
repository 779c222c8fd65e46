"""What the benchmark of transports reads from the logs of NCCL and UCX."""

from __future__ import annotations

from bench.gpu.transports_in_logs import NOTES, notes, read_by

UCX = """\
[1.1] [vm:9 :0] ucp_worker.c:1997 UCX  INFO    taker intra-node cfg#1 am(tcp/lo cma/memory)
[1.2] [vm:9 :0]   +--------+-------------+-----------------------------------+
[1.2] [vm:9 :0]   | taker intra-node cfg#1                                   |
[1.2] [vm:9 :0]   | remote memory write by ucp_put* from host memory to host |
[1.2] [vm:9 :0]   +--------+-------------+-----------------------------------+
[1.2] [vm:9 :0]   | Range  | Description |              Config               |
[1.2] [vm:9 :0]   +--------+-------------+-----------------------------------+
[1.2] [vm:9 :0]   | 0..inf | zero-copy   | cma/memory                        |
[1.2] [vm:9 :0]   +--------+-------------+-----------------------------------+
[1.3] [vm:9 :0]   +-----------+-------------+------------------------------------------+
[1.3] [vm:9 :0]   | taker intra-node cfg#1                                             |
[1.3] [vm:9 :0]   | remote memory read by ucp_get*(multi) into cuda/GPU0 from cuda     |
[1.3] [vm:9 :0]   +-----------+-------------+------------------------------------------+
[1.3] [vm:9 :0]   |   Range   | Description |              Config                      |
[1.3] [vm:9 :0]   +-----------+-------------+------------------------------------------+
[1.3] [vm:9 :0]   |         0 | short       | tcp/lo                                   |
[1.3] [vm:9 :0]   |    1..inf | zero-copy   | cuda_ipc/cuda                            |
[1.3] [vm:9 :0]   +-----------+-------------+------------------------------------------+
"""


def test_only_reads_are_told_and_each_once() -> None:
    assert read_by(UCX + UCX) == ["0 short tcp/lo", "1..inf zero-copy cuda_ipc/cuda"]
    assert read_by("nothing of UCX | here") == []


def test_warnings_are_noted_once_and_not_without_end() -> None:
    line = "h:1 NCCL WARN Duplicate GPU detected\n"
    assert notes(UCX + line * 3) == [line.strip()]
    assert len(notes("\n".join(f"{line.strip()} {number}" for number in range(100)))) == NOTES
