"""How each layout of weights gets into a model: proven once, then done by copies that are ready before the pause."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from sglang_rollout.transfer.manifest import Manifest
from sglang_rollout.transfer.stage_index import SlotEntry

from .mapped import MappedStage
from .parameters import Parameters
from .rehearsal import Fill, Outcome, RehearsalImpossible, rehearse


@dataclass
class LoadPlan:
    """Of one layout. `outcome` is None when the model could not be watched. `ready`: source views of the copies, by
    slot, and the mapping that they lie in."""

    outcome: Outcome | None
    reason: str = ""
    ready: dict[tuple[str, str], tuple[int, list[Any]]] = field(default_factory=dict)

    @property
    def notes(self) -> tuple[str, ...]:
        if self.outcome is None:
            return (f"whether the model can take every tensor was not tried: {self.reason}",)
        more = self.outcome.more
        return (*self.outcome.notes, *([f"loaded by the model's own way: {more}"] if more else []))

    @property
    def by_copies(self) -> bool:
        return self.outcome is not None and self.outcome.steps is not None


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

    def plan(self, manifest: Manifest) -> tuple[LoadPlan, bool]:
        """And whether it was made now. Its outcome may hold problems."""
        known = self._plans.get(manifest.layout)
        if known is not None:
            return known, False
        try:
            plan = LoadPlan(rehearse(self.model, manifest.tensors.values()))
        except RehearsalImpossible as reason:
            plan = LoadPlan(None, str(reason))
        if plan.outcome is None or not plan.outcome.problems:
            self._plans[manifest.layout] = plan
        return plan, True

    def make_ready(self, plan: LoadPlan, stage: MappedStage, slot: SlotEntry, manifest: Manifest) -> list[Any]:
        """The source of each copy, None of each fill."""
        assert plan.outcome is not None
        assert plan.outcome.steps is not None
        key = (slot.name, manifest.placing)
        known = plan.ready.get(key)
        if known is not None and known[0] == stage.generation(slot):
            return known[1]
        tensors = dict(stage.tensors(slot, manifest))
        sources = [
            None
            if isinstance(step, Fill)
            else tensors[step.name].as_strided(
                step.shape, step.stride, tensors[step.name].storage_offset() + step.offset
            )
            for step in plan.outcome.steps
        ]
        plan.ready[key] = (stage.generation(slot), sources)
        return sources

    def load(self, plan: LoadPlan, stage: MappedStage, slot: SlotEntry, manifest: Manifest, on_gpu: bool) -> None:
        """Only orders the copies: the caller synchronises before the stage may change."""
        if not plan.by_copies:
            with unblocked_copies(on_gpu and stage.on_host(slot)):
                self.model.load_weights(stage.tensors(slot, manifest))
            return
        sources = self.make_ready(plan, stage, slot, manifest)
        assert plan.outcome is not None
        assert plan.outcome.steps is not None
        for step, source in zip(plan.outcome.steps, sources, strict=True):
            if isinstance(step, Fill):
                step.target.fill_(step.value)
            else:
                step.target.copy_(source, non_blocking=True)


def unblocked_copies(wanted: bool) -> AbstractContextManager[Any]:
    """Within it, copies are only ordered: from pinned memory they run back to back at the speed of the link."""
    return _Unblocked() if wanted else nullcontext()


class _Unblocked(TorchFunctionMode):  # type: ignore[misc]
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            return func(*args, **{**(kwargs or {}), "non_blocking": True})
        return func(*args, **(kwargs or {}))
