"""How each layout of weights gets into a model: proven once, then done by copies that are ready before the pause."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from sglang_rollout.transfer.manifest import Manifest, Tensor
from sglang_rollout.transfer.stage_index import SlotEntry

from .mapped import MappedStage, placed
from .parameters import Parameters
from .rehearsal import Copy, Fill, Outcome, RehearsalImpossible, Step, rehearse
from .runs import Piece, Place, Run, divided, runs_of

SMALL_BYTES = 8 << 20
"""A copy of less takes a GPU less time than ordering it takes Python: these are ordered together."""


@dataclass(frozen=True)
class Laid:
    """What loading does from slots in which all lies alike: the runs, and the tensors that the other steps read, each
    with its region and the bytes before it."""

    runs: list[Run]
    read: dict[str, tuple[Tensor, int, int]]


@dataclass
class Ready:
    """The same from one mapping of a slot: `steps` in their order, `source` None for a fill, then `copies` and `small`
    ones as two lists, targets and sources, which meet no other step's place."""

    generation: int
    steps: list[tuple[Step, Any]] = field(default_factory=list)
    copies: list[tuple[Any, Any]] = field(default_factory=list)
    small: tuple[list[Any], list[Any]] = field(default_factory=lambda: ([], []))


@dataclass
class LoadPlan:
    """Of one layout. `outcome` is None when the model could not be watched. `laid`: by placing and the regions' sizes;
    `ready`: by slot and placing."""

    outcome: Outcome | None
    reason: str = ""
    laid: dict[tuple[str, tuple[int, ...]], Laid] = field(default_factory=dict)
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

    @cached_property
    def divided(self) -> tuple[list[Piece], list[Step]]:
        assert self.outcome is not None
        assert self.outcome.steps is not None
        return divided(self.outcome.steps)

    def find_out(self) -> None:
        """Now, and not in a pause, what is the same for all weights of this layout."""
        if self.by_copies and self.outcome is not None and not self.outcome.problems:
            _ = self.divided, self.outcome.keeps_words


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

    def plan(self, layout: str, tensors: Callable[[], Iterable[Tensor]]) -> tuple[LoadPlan, bool]:
        """And whether it was made now. Its outcome may hold problems."""
        known = self._plans.get(layout)
        if known is not None:
            return known, False
        try:
            plan = LoadPlan(rehearse(self.model, tensors()))
        except RehearsalImpossible as reason:
            plan = LoadPlan(None, str(reason))
        plan.find_out()
        if plan.outcome is None or not plan.outcome.problems:
            self._plans[layout] = plan
        return plan, True

    def make_ready(self, plan: LoadPlan, stage: MappedStage, slot: SlotEntry, manifest: StagedManifest) -> Ready:
        key = (slot.name, manifest.placing)
        known = plan.ready.get(key)
        if known is not None and known.generation == stage.generation(slot):
            return known
        laid = self._laid(plan, slot, manifest)
        ready = Ready(stage.generation(slot))
        tensors = stage.some_tensors(slot, laid.read)
        for step in plan.divided[1]:
            ready.steps.append((step, _source(step, tensors)))
        for run in laid.runs:
            _add(ready, run, stage.region(slot, run.region))
        plan.ready[key] = ready
        return ready

    def _laid(self, plan: LoadPlan, slot: SlotEntry, manifest: StagedManifest) -> Laid:
        """Slots are of one size: for the second one nothing has to be read or found out."""
        key = (manifest.placing, tuple(region.size for region in slot.regions))
        if key not in plan.laid:
            pieces, rest = plan.divided
            wanted = {step.name for step in rest if isinstance(step, Copy)}
            places: dict[str, Place] = {}
            read = {}
            for tensor, region, begin in placed(slot.regions, manifest.whole):
                places[tensor.name] = (region, begin)
                if tensor.name in wanted:
                    read[tensor.name] = (tensor, region, begin)
            plan.laid[key] = Laid(runs_of(pieces, places), read)
        return plan.laid[key]

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
        for target, source in ready.copies:
            target.copy_(source, non_blocking=True)
        if ready.small[0]:
            torch._foreach_copy_(*ready.small, non_blocking=True)


def _source(step: Step, tensors: dict[str, Any]) -> Any:
    if isinstance(step, Fill):
        return None
    held = tensors[step.name]
    return held.as_strided(step.shape, step.stride, held.storage_offset() + step.offset)


def _add(ready: Ready, run: Run, region: Any) -> None:
    """Between host and GPU, what is not in one piece would be gathered first, by the processor."""
    for one in [run] if run.anchor.device == region.device else run.singles():
        target, source = one.views(region)
        if one.dense and one.rows.width < SMALL_BYTES:
            ready.small[0].append(target)
            ready.small[1].append(source)
        else:
            ready.copies.append((target, source))


def unblocked_copies(wanted: bool) -> AbstractContextManager[Any]:
    """Within it, copies are only ordered: from pinned memory they run back to back at the speed of the link."""
    return _Unblocked() if wanted else nullcontext()


class _Unblocked(TorchFunctionMode):  # type: ignore[misc]
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            return func(*args, **{**(kwargs or {}), "non_blocking": True})
        return func(*args, **(kwargs or {}))
