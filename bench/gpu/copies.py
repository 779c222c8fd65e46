"""python -m bench.gpu.copies: how fast a GPU copies the experts of some layers from a stage to where a model holds
them, ordered in different ways. Prints one line of JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sglang_rollout.engine.loader.rehearsal import Copy
from sglang_rollout.engine.loader.runs import Run, divided, runs_of

from .models import SHAPES

LAYERS = 8
REPEATS = 5
BYTES = 2  # of an element


def main() -> None:
    cuda = "--cpu" not in sys.argv
    size = SHAPES["30b-a3b" if cuda else "tiny-moe"]
    device = "cuda" if cuda else "cpu"
    count, hidden, inner = size["num_experts"], size["hidden_size"], size["moe_intermediate_size"]
    total = LAYERS * count * 3 * inner * hidden * BYTES
    stage = torch.ones(total, dtype=torch.uint8, device=device)
    whole = torch.empty_like(stage)
    steps, places = [], {}
    begin = 0
    for layer in range(LAYERS):
        up = torch.empty(count, 2 * inner, hidden, dtype=torch.bfloat16, device=device)
        down = torch.empty(count, hidden, inner, dtype=torch.bfloat16, device=device)
        for expert in range(count):
            for kind, target in _targets(up[expert], down[expert], inner):
                name = f"{layer}.{expert}.{kind}"
                steps.append(Copy(target, name, tuple(target.shape), target.stride(), 0))
                places[name] = (0, begin)
                begin += target.numel() * BYTES
    pieces, _ = divided(steps)
    runs = runs_of(pieces, places)
    joined = [one for run in runs for one in run.singles()]
    plain = [
        (step.target, stage[at : at + step.target.numel() * BYTES].view(torch.bfloat16).view(step.shape))
        for step in steps
        for at in (places[step.name][1],)
    ]
    words, folded = _views(joined, stage), _views(runs, stage)
    wide = [(target.view(torch.complex128), source.view(torch.complex128)) for target, source in folded]
    ways: dict[str, Callable[[], Any]] = {
        "all in one piece": lambda: whole.copy_(stage),
        "each tensor by itself": lambda: _each(plain),
        "each tensor, ordered together": lambda: _together(plain),
        "neighbours joined, as words, ordered together": lambda: _together(words),
        "neighbours joined, each by itself": lambda: _each(words),
        "folded, words of 8 bytes": lambda: _each(folded),
        "folded, words of 16 bytes": lambda: _each(wide),
    }
    found: dict[str, Any] = {"GB": round(total / 1e9, 2), "tensors": len(steps), "runs": len(runs)}
    for name, way in ways.items():
        seconds = min(_timed(way, cuda) for _ in range(REPEATS))
        found[name] = f"{seconds * 1e3:.2f} ms, {total / 1e9 / seconds:.0f} GB/s"
        print(name, found[name], file=sys.stderr, flush=True)
    print(json.dumps(found))


def _targets(up: Any, down: Any, inner: int) -> Iterator[tuple[str, Any]]:
    yield "gate", up[:inner]
    yield "up", up[inner:]
    yield "down", down


def _views(runs: list[Run], stage: Any) -> list[tuple[Any, Any]]:
    return [run.views(stage) for run in runs]


def _each(copies: list[tuple[Any, Any]]) -> None:
    for target, source in copies:
        target.copy_(source, non_blocking=True)


def _together(copies: list[tuple[Any, Any]]) -> None:
    torch._foreach_copy_([target for target, _ in copies], [source for _, source in copies], non_blocking=True)


def _timed(way: Callable[[], Any], cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    way()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
