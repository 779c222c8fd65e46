"""What the wire's bench does on two GPUs and on one, and that docs/gpu-benchmark.md tells how long that takes."""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from pathlib import Path

import pytest

from bench.gpu.wire import PARTS, SIZES_MIB, Planned, planned
from bench.gpu.wire_bench import Bench

PAGE = Path(__file__).parents[2] / "docs" / "gpu-benchmark.md"
ROW = re.compile(r"^\| `(\w+)` \| .* \| (\d+|-) \| (\d+|-) \|$", re.MULTILINE)


def plan(tmp_path: Path, *, one_gpu: bool) -> list[Planned]:
    bench = Bench(tmp_path, shape="tiny", cpu=False, streams=1, one_gpu=one_gpu)
    words = {"sizes": SIZES_MIB, "cpu": False, "one_gpu": one_gpu, "only": PARTS, "repeats": 5}
    return planned(bench, argparse.Namespace(**words))


@pytest.mark.parametrize("one_gpu", [False, True])
def test_the_page_tells_the_seconds_of_each_part(tmp_path: Path, one_gpu: bool) -> None:
    expected: dict[str, float] = defaultdict(float)
    for step in plan(tmp_path, one_gpu=one_gpu):
        expected[step.part] += step.expected
    del expected["first"]  # is among what is always done
    told = {row[0]: row[1 + one_gpu] for row in ROW.findall(PAGE.read_text())}
    assert {part: int(seconds) for part, seconds in told.items() if seconds != "-"} == {
        part: int(seconds + 0.5) for part, seconds in expected.items()
    }


def test_one_gpu_is_asked_for_nothing_that_takes_two(tmp_path: Path) -> None:
    names = [step.name for step in plan(tmp_path, one_gpu=True)]
    assert [name for name in names if "NCCL" in name or "TP 2" in name or name == "direct"] == []
    assert "agent killed, PeerCopy" in names
