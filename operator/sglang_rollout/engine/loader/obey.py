"""One call of the agent: done, and reported whatever came of it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from sglang_rollout.transfer.cuda_driver import CudaError
from sglang_rollout.transfer.hook_call import CallRefused, HookCall
from sglang_rollout.transfer.hook_report import HookReport, write_report
from sglang_rollout.transfer.manifest import Manifest
from sglang_rollout.transfer.stage_index import (
    DEFAULT_FOLDER,
    ENV_FOLDER,
    SlotEntry,
    StageUnusable,
    read_index,
    read_manifest,
    read_running,
)

from .mapped import MappedStage
from .parameters import sums_digest, whole_sum
from .plans import LoadPlan, ModelPlans, StagedManifest


class LoadRefused(Exception):
    """The model cannot take the weights, or has not taken them; the sentence says why."""


MANIFESTS = 4  # parsed ones that are kept


@dataclass
class LoaderState:
    """What one process keeps between calls: a pause is too short to find it all out again. Models by id, manifests by
    root."""

    stage: MappedStage | None = None
    models: dict[int, ModelPlans] = field(default_factory=dict)
    manifests: dict[str, Manifest] = field(default_factory=dict)


_STATE = LoaderState()


def obey(model: Any, names: Sequence[str], state: LoaderState = _STATE) -> HookReport | None:
    """Returns the report that was written; None when there was nothing to answer."""
    folder = Path(os.environ.get(ENV_FOLDER, DEFAULT_FOLDER))
    try:
        call = HookCall.from_name(names[0] if len(names) == 1 else "")
    except CallRefused as error:
        print(f"weight loader: {error}", flush=True)
        return None
    if call.model and call.model != type(model).__name__:
        return None
    report = _blank(model, call)
    work = Work(model, call, state, folder)
    try:
        with torch.no_grad():
            getattr(work, call.action)()
    except (LoadRefused, StageUnusable, CudaError) as error:
        report = replace(report, problem=str(error))
    except Exception as error:
        report = replace(report, problem=f"{type(error).__name__}: {error}"[:2000])
    report = replace(
        report,
        written=work.written,
        notes=tuple(work.notes),
        compared=work.compared,
        sums_digest=work.sums_digest,
        layouts=work.layouts,
        seconds=work.seconds,
    )
    write_report(folder, report)
    return report


class Work:
    """One call under way."""

    def __init__(self, model: Any, call: HookCall, state: LoaderState, folder: Path) -> None:
        self._model = model
        self._call = call
        self._state = state
        self._folder = folder
        self._device = _device(model)
        self._known: ModelPlans | None = None
        self.written = False
        self.notes: list[str] = []
        self.compared = ""
        self.sums_digest = ""
        self.seconds: dict[str, float] = {}

    def register(self) -> None:
        index = read_index(self._folder)
        for slot in index.slots:
            self._map(slot)
        if (running := read_running(self._folder)) is not None:
            with self._timed("rehearse"):  # what was wrong with it will be said of weights that are staged
                self._plans().plan(running.layout, lambda: running.tensors.values())
        for held in index.slots:
            if held.sealed is not None:
                manifest = StagedManifest(held, self._manifest)
                plan = self._plan(manifest)
                for slot in index.slots:
                    self._make_ready(plan, slot, manifest)

    def check(self) -> None:
        slot, manifest = self._find()
        self._make_ready(self._plan(manifest), slot, manifest)

    def apply(self) -> None:
        slot, manifest = self._find()
        plan = self._plan(manifest)
        self._make_ready(plan, slot, manifest)
        with self._timed("wait"):
            self._synchronize()  # a forward pass may be under way: an in-place pause does not wait for it
        self.written = True
        with self._timed("copy"):
            self._plans().load(plan, self._stage(), slot, manifest, self._device.type == "cuda")
            if self._call.sums:
                self._plans().parameters.order_sums()
            self._synchronize()
        if read_index(self._folder).slot(slot.name).sealed != slot.sealed:
            raise LoadRefused("the stage was given up while it was being loaded: load it again")
        if self._call.sums:
            self._compare(slot, plan)

    def sums(self) -> None:
        with self._timed("sums"):
            parameters = self._plans().parameters
            parameters.order_sums()
            self.sums_digest = sums_digest(parameters.ordered_sums())

    def _find(self) -> tuple[SlotEntry, StagedManifest]:
        with self._timed("find"):
            slot = read_index(self._folder).holding(self._call.root)
            manifest = StagedManifest(slot, self._manifest)
        self._map(slot)
        return slot, manifest

    def _manifest(self, slot: SlotEntry) -> Manifest:
        known = self._state.manifests
        root = slot.sealed.root if slot.sealed else ""
        if root not in known:
            manifest = read_manifest(self._folder, slot)
            while len(known) >= MANIFESTS:
                del known[next(iter(known))]
            known[root] = manifest
        return known[root]

    def _stage(self) -> MappedStage:
        if self._state.stage is None or self._state.stage.folder != self._folder:
            self._state.stage = MappedStage(self._folder, self._device)
        return self._state.stage

    def _map(self, slot: SlotEntry) -> None:
        with self._timed("map"):
            self._stage().map(slot, pin=self._device.type == "cuda")

    def _plans(self) -> ModelPlans:
        if self._known is None:
            known = self._state.models.get(id(self._model))
            if known is None or known.model is not self._model or not known.parameters.unmoved():
                known = self._state.models[id(self._model)] = ModelPlans(self._model)
            self._known = known
        return self._known

    def _plan(self, manifest: StagedManifest) -> LoadPlan:
        """Tries loading without writing, once for each layout. Raises LoadRefused."""
        begin = time.perf_counter()
        plan, made = self._plans().plan(manifest.layout, lambda: manifest.whole.tensors.values())
        if made:
            self.seconds["rehearse"] = round(time.perf_counter() - begin, 6)
        if plan.outcome is not None and plan.outcome.problems:
            raise LoadRefused("; ".join(plan.outcome.problems))
        self.notes = list(plan.notes)
        return plan

    def _make_ready(self, plan: LoadPlan, slot: SlotEntry, manifest: StagedManifest) -> None:
        if plan.by_copies:
            with self._timed("ready"):
                self._plans().make_ready(plan, self._stage(), slot, manifest)

    def _compare(self, slot: SlotEntry, plan: LoadPlan) -> None:
        with self._timed("sums"):
            sums = self._plans().parameters.ordered_sums()
            self.sums_digest = sums_digest(sums)
        total = whole_sum(sums)
        staged = slot.sealed.word_sum if slot.sealed else None
        if _world()[1] != 1:
            self.compared = "not held against the stage: this rank has a part of it"
        elif staged is None or total is None or plan.outcome is None or not plan.outcome.keeps_words:
            self.compared = "not held against the stage: not all bytes are loaded as they are"
        elif total == staged:
            self.compared = "equal"
        else:
            self.compared = "different"
            raise LoadRefused("the model's bytes are not the staged ones after loading them: their sums differ")

    @property
    def layouts(self) -> tuple[str, ...]:
        known = self._state.models.get(id(self._model))
        return known.layouts if known is not None else ()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - begin, 6)


def _blank(model: Any, call: HookCall) -> HookReport:
    rank, world = _world()
    return HookReport(
        call.transaction, str(call.action), rank, world, type(model).__name__, os.getpid(), call.version, call.root
    )


def _world() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def _device(model: Any) -> Any:
    for parameter in model.parameters():
        return parameter.device
    return torch.device("cpu")
