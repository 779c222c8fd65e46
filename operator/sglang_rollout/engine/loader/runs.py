"""Many copies as few: what lies side by side on both sides is joined, and what repeats at equal distances is folded
into one copy with strides. A model with experts has tens of thousands of tensors, too many to order in a pause."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import torch

from .rehearsal import Copy, Step

LEAST_FOLDED = 4
"""Fewer are ordered one by one: whole pieces are copied a little faster than strided ones."""
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}

Place = tuple[int, int]
"""Number of a slot's region, and bytes from its begin."""


@dataclass(frozen=True, slots=True)
class Rows:
    """`count` rows of `width` bytes, a step of bytes from each to the next; one row when all is in one piece."""

    count: int
    width: int
    target_step: int = 0
    source_step: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """A copy to the address `target` in the memory of `anchor`, which has the identity `memory`, from `offset` bytes in
    tensor `name`."""

    anchor: Any
    memory: int
    target: int
    name: str
    offset: int
    rows: Rows


@dataclass(frozen=True, slots=True)
class Run:
    """`count` pieces of equal rows, a jump of bytes from each to the next; `source`: bytes from the region's begin."""

    anchor: Any
    memory: int
    target: int
    region: int
    source: int
    rows: Rows
    count: int = 1
    target_jump: int = 0
    source_jump: int = 0

    @property
    def dense(self) -> bool:
        return self.count == 1 and self.rows.count == 1

    def alike(self, other: Run) -> bool:
        """Of equal rows in the same memory on both sides."""
        return self.memory == other.memory and self.region == other.region and self.rows == other.rows

    def singles(self) -> Iterator[Run]:
        for number in range(self.count):
            yield replace(
                self,
                target=self.target + number * self.target_jump,
                source=self.source + number * self.source_jump,
                count=1,
            )

    def views(self, region: Any) -> tuple[Any, Any]:
        """Target and source, as tensors of whole words. `region`: its flat bytes."""
        rows, begin = self.rows, region.data_ptr() + self.source
        targets = ((self.count, self.target_jump), (rows.count, rows.target_step))
        sources = ((self.count, self.source_jump), (rows.count, rows.source_step))
        steps = [step for count, step in (*targets, *sources) if count > 1]
        word = gcd(8, self.target, begin, rows.width, *steps)
        return _words(self.anchor, self.target, targets, rows.width, word), _words(
            region, begin, sources, rows.width, word
        )


def _words(held: Any, address: int, repeats: Sequence[tuple[int, int]], width: int, word: int) -> Any:
    storage = held.untyped_storage()
    wanted = [(count, step) for count, step in repeats if count > 1]
    shape = [*(count for count, _ in wanted), width // word]
    strides = [*(step // word for _, step in wanted), 1]
    empty = torch.empty(0, dtype=_WORDS[word], device=held.device)
    return empty.set_(storage, (address - storage.data_ptr()) // word, shape, strides)


def divided(steps: Sequence[Step]) -> tuple[list[Piece], list[Step]]:
    """Copies of whole rows that no other step meets, and all other steps in their order."""
    pieces: list[Piece] = []
    rest: list[Step] = []
    for step, alone in zip(steps, alone_in_place(steps), strict=True):
        rows = _rows(step) if alone and isinstance(step, Copy) else None
        if rows is None or not isinstance(step, Copy):
            rest.append(step)
        else:
            offset = step.offset * step.target.element_size()
            memory = int(step.target.untyped_storage()._cdata)
            pieces.append(Piece(step.target, memory, step.target.data_ptr(), step.name, offset, rows))
    pieces.sort(key=lambda piece: piece.target)
    return pieces, rest


def _rows(step: Copy) -> Rows | None:
    target, size = step.target, step.target.element_size()
    if step.converts or not target.numel():
        return None
    if step.packed and target.is_contiguous():
        return Rows(1, target.numel() * size)
    if target.dim() != 2 or tuple(target.shape) != step.shape or step.stride[1] != 1 or target.stride(1) != 1:
        return None
    count, width = step.shape
    return Rows(count, width * size, target.stride(0) * size, step.stride[0] * size)


def runs_of(pieces: Iterable[Piece], places: Mapping[str, Place]) -> list[Run]:
    """In the order of their targets. Pieces too few to be folded are runs of one."""
    found: list[Run] = []
    for run in _folded(_joined(pieces, places)):
        if run.count < LEAST_FOLDED:
            found.extend(run.singles())
        else:
            found.append(run)
    return found


def _joined(pieces: Iterable[Piece], places: Mapping[str, Place]) -> Iterator[Run]:
    """Pieces without rows that follow each other on both sides, in the memory of one parameter."""
    first: Piece | None = None
    region = source = width = 0
    for piece in pieces:
        at, begin = places[piece.name]
        begin += piece.offset
        if (
            first is not None
            and first.rows.count == piece.rows.count == 1
            and first.memory == piece.memory
            and region == at
            and piece.target == first.target + width
            and begin == source + width
        ):
            width += piece.rows.width
            continue
        if first is not None:
            yield _run(first, region, source, width)
        first, region, source, width = piece, at, begin, piece.rows.width
    if first is not None:
        yield _run(first, region, source, width)


def _run(piece: Piece, region: int, source: int, width: int) -> Run:
    rows = piece.rows if piece.rows.width == width else Rows(1, width)
    return Run(piece.anchor, piece.memory, piece.target, region, source, rows)


def _folded(runs: Iterable[Run]) -> Iterator[Run]:
    """Of equal ones, as many as follow each other at the jumps from the first to the second."""
    first: Run | None = None
    count = target_jump = source_jump = 0
    for run in runs:
        if first is not None and run.alike(first):
            jumps = run.target - first.target, run.source - first.source
            if count == 1 and jumps[1] >= 0:
                target_jump, source_jump = jumps
            if jumps == (count * target_jump, count * source_jump):
                count += 1
                continue
        if first is not None:
            yield replace(first, count=count, target_jump=target_jump, source_jump=source_jump)
        first, count, target_jump, source_jump = run, 1, 0, 0
    if first is not None:
        yield replace(first, count=count, target_jump=target_jump, source_jump=source_jump)


def alone_in_place(steps: Sequence[Step]) -> list[bool]:
    """Of each step, whether the others leave the span that it writes alone, so that their order is of no concern."""
    alone = [True] * len(steps)
    last, end = -1, -1
    for begin, number in sorted((step.target.data_ptr(), number) for number, step in enumerate(steps)):
        if begin < end:
            alone[number] = alone[last] = False
        if begin + _span(steps[number].target) > end:
            last, end = number, begin + _span(steps[number].target)
    return alone


def _span(target: Any) -> int:
    """Bytes from the first element to behind the last."""
    reach = sum((size - 1) * step for size, step in zip(target.shape, target.stride(), strict=True))
    return int((reach + 1) * target.element_size()) if target.numel() else 0
