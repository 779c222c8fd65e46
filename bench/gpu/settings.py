"""What is measured, and with which engine."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from .models import SHAPES

GPU_ARGUMENTS = (
    "--attention-backend", "triton",
    "--sampling-backend", "pytorch",
    "--grammar-backend", "none",
    "--cuda-graph-max-bs", "32",
    "--cuda-graph-backend-prefill", "disabled",
    "--incremental-streaming-output",
    "--max-running-requests", "64",
    "--skip-server-warmup",
    "--enable-memory-saver",
)  # fmt: skip
"""An engine of few dependencies that leaves room on the GPU for stages and for a trainer's copy."""


@dataclass(frozen=True)
class Settings:
    """`work` holds checkpoints and stages; shared memory, so that no disk is measured."""

    shape: str
    cpu: bool
    streams: int
    repeats: int
    port: int
    work: Path
    out: Path
    engine_arguments: tuple[str, ...]
    threads: int
    lean: bool

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def read_settings() -> Settings:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--shape", default="8b", choices=sorted(SHAPES), help="a Qwen3 of that size, random weights")
    parser.add_argument("--cpu", action="store_true", help="a dry run on SGLang's CPU path; says nothing about speed")
    parser.add_argument("--streams", type=int, default=32, help="requests that decode all the while")
    parser.add_argument("--repeats", type=int, default=8, help="of each measurement")
    parser.add_argument("--port", type=int, default=30900)
    parser.add_argument("--work", type=Path, default=Path("/dev/shm/sglang-rollout-bench"))
    parser.add_argument("--out", type=Path, default=Path("out/gpu"), help="results.json, table.md and logs")
    parser.add_argument("--threads", type=int, default=8, help="that read a checkpoint into the stage")
    parser.add_argument(
        "--mem-fraction-static", default="0.35", help="SGLang's flag: room for stages is left beside it"
    )
    parser.add_argument(
        "--lean",
        action="store_true",
        help="for models that do not fit twice: one version staged on the GPU, the other in host memory, no checkpoint",
    )
    parser.add_argument("engine", nargs="*", help="SGLang's flags instead of the defaults, after --")
    given = parser.parse_args()
    on_gpu = (*GPU_ARGUMENTS, "--mem-fraction-static", given.mem_fraction_static)
    arguments = tuple(given.engine) or (() if given.cpu else on_gpu)
    return Settings(
        given.shape, given.cpu, given.streams, given.repeats, given.port, given.work, given.out, arguments,
        given.threads, given.lean,
    )  # fmt: skip
