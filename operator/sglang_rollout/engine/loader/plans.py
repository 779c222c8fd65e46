"""How each layout of weights gets into a model: proven once, then done by copies that are ready before the pause."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from sglang_rollout.transfer.manifest import Manifest
from sglang_rollout.transfer.stage_index import SlotEntry

from .mapped import MappedStage
from .parameters import Parameters
from .rehearsal import Copy, Fill, Outcome, RehearsalImpossible, rehearse

SMALL_BYTES = 8 << 20
"""A copy of less takes a GPU less time than ordering it takes Python: these are ordered together."""


@dataclass
class Ready:
    """What loading does from one mapping of a slot: `steps` in their order, `source` None for a fill, and `small`
    copies of which no other step writes to the same place, as two lists, targets and sources."""

    generation: int
    steps: list[tuple[Copy | Fill, Any]] = field(default_factory=list)
    small: tuple[list[Any], list[Any]] = field(default_factory=lambda: ([], []))


@dataclass
class LoadPlan:
    """Of one layout. `outcome` is None when the model could not be watched. `ready`: by slot and placing in it."""

    outcome: Outcome | None
    reason: str = ""
    ready: dict[tuple[str, str], Ready] = field(default_factory=dict)

    @property
    def notes(self) -> tuple[str, ...]:
        if self.outcome is None:
            return (f"whether the model can take every tensor was not tried: {self.reason}",)
        more = self.outcome.more
        return (*self.outcome.notes, *([f"loaded by the model's own way: {more}"] if more else []))

    @property
    def by_copies(self) -> bool:
        return self.outcome is not None and self.outcome.steps is not None


class StagedManifest:
    """Of what a slot holds; read from its file only when more is asked for than the index tells. `read` raises
    StageUnusable."""

    def __init__(self, slot: SlotEntry, read: Callable[[SlotEntry], Manifest]) -> None:
        self._slot = slot
        self._read = read
        sealed = slot.sealed
        self.layout = sealed.layout if sealed and sealed.layout else self.whole.layout
        self.placing = sealed.placing if sealed and sealed.placing else self.whole.placing

    @cached_property
    def whole(self) -> Manifest:
        return self._read(self._slot)


class ModelPlans:
    """What is known of one model in this process."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.parameters = Parameters(model)
        self._plans: dict[str, LoadPlan] = {}

    @property
    def layouts(self) -> tuple[str, ...]:
        """Those that the model is known to take."""
        return tuple(layout for layout, plan in self._plans.items() if plan.outcome is not None)

    def plan(self, manifest: StagedManifest) -> tuple[LoadPlan, bool]:
        """And whether it was made now. Its outcome may hold problems."""
        known = self._plans.get(manifest.layout)
        if known is not None:
            return known, False
        try:
            plan = LoadPlan(rehearse(self.model, manifest.whole.tensors.values()))
        except RehearsalImpossible as reason:
            plan = LoadPlan(None, str(reason))
        if plan.outcome is None or not plan.outcome.problems:
            self._plans[manifest.layout] = plan
        return plan, True

    def make_ready(self, plan: LoadPlan, stage: MappedStage, slot: SlotEntry, manifest: StagedManifest) -> Ready:
        assert plan.outcome is not None
        assert plan.outcome.steps is not None
        key = (slot.name, manifest.placing)
        known = plan.ready.get(key)
        if known is not None and known.generation == stage.generation(slot):
            return known
        tensors = dict(stage.tensors(slot, manifest.whole))
        ready = plan.ready[key] = Ready(stage.generation(slot))
        for step, alone in zip(plan.outcome.steps, alone_in_place(plan.outcome.steps), strict=True):
            if isinstance(step, Fill):
                ready.steps.append((step, None))
                continue
            held = tensors[step.name]
            source = held.as_strided(step.shape, step.stride, held.storage_offset() + step.offset)
            if alone and _small(step.target, source):
                ready.small[0].append(step.target)
                ready.small[1].append(source)
            else:
                ready.steps.append((step, source))
        return ready

    def load(self, plan: LoadPlan, stage: MappedStage, slot: SlotEntry, manifest: StagedManifest, on_gpu: bool) -> None:
        """Only orders the copies: the caller synchronises before the stage may change."""
        if not plan.by_copies:
            with unblocked_copies(on_gpu and stage.on_host(slot)):
                self.model.load_weights(stage.tensors(slot, manifest.whole))
            return
        ready = self.make_ready(plan, stage, slot, manifest)
        for step, source in ready.steps:
            if isinstance(step, Fill):
                step.target.fill_(step.value)
            else:
                step.target.copy_(source, non_blocking=True)
        if ready.small[0]:
            torch._foreach_copy_(*ready.small, non_blocking=True)


def _small(target: Any, source: Any) -> bool:
    """One that is cut, turned or converted would make the whole list be done singly."""
    alike = source.dtype == target.dtype and source.shape == target.shape
    dense = source.is_contiguous() and target.is_contiguous()
    return bool(alike and dense and source.numel() * source.element_size() < SMALL_BYTES)


def alone_in_place(steps: Sequence[Copy | Fill]) -> list[bool]:
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


def unblocked_copies(wanted: bool) -> AbstractContextManager[Any]:
    """Within it, copies are only ordered: from pinned memory they run back to back at the speed of the link."""
    return _Unblocked() if wanted else nullcontext()


class _Unblocked(TorchFunctionMode):  # type: ignore[misc]
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            return func(*args, **{**(kwargs or {}), "non_blocking": True})
        return func(*args, **(kwargs or {}))
