"""Watches a model load weights: to try it without writing a byte, and to not wait for each copy.

Every SGLang model ends at tensor.copy_ of a source into a slice of a parameter; torch tells of each such call."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from sglang_rollout.transfer.comparison import some
from sglang_rollout.transfer.dtypes import DTYPES
from sglang_rollout.transfer.manifest import Tensor


class RehearsalImpossible(Exception):
    """This model's loading needs the values, or copies in threads, where it cannot be watched."""


@dataclass(frozen=True)
class Outcome:
    """`problems` forbid loading. `notes`: tensors that the model does not use, types that are converted."""

    problems: tuple[str, ...]
    notes: tuple[str, ...]


def rehearse(model: Any, tensors: Iterable[Tensor]) -> Outcome:
    """Runs the model's own load_weights with tensors that have shapes and no values, and keeps every write from
    happening. A write that escapes (from another thread) fails for want of values instead of being done."""
    watch = _Rehearsal(model)
    now = ""
    used: dict[str, int] = {}

    def sources() -> Iterator[tuple[str, Any]]:
        nonlocal now
        for tensor in tensors:
            now = tensor.name
            before = watch.writes
            yield now, torch.empty(tensor.shape, dtype=getattr(torch, DTYPES[tensor.dtype].torch), device="meta")
            used[tensor.name] = watch.writes - before
            watch.name_problems(tensor.name)

    try:
        with watch:
            model.load_weights(sources())
    except (NotImplementedError, RuntimeError) as error:
        if "meta" in str(error).lower():
            raise RehearsalImpossible(str(error).splitlines()[0][:200]) from error
        return Outcome((f"the model cannot load tensor {now}: {_first_line(error)}",), ())
    except Exception as error:
        return Outcome((f"the model cannot load tensor {now}: {_first_line(error)}",), ())
    watch.name_problems(now)
    unused = sorted(name for name, count in used.items() if not count)
    notes = [f"the model makes no use of {some(unused)}"] if unused else []
    if watch.converted:
        notes.append(f"converted to the model's type: {some(sorted(watch.converted))}")
    return Outcome((*watch.problems, *watch.unwritten()), tuple(notes))


def unblocked_copies(wanted: bool) -> AbstractContextManager[Any]:
    """Within it, copies are only ordered: from pinned memory they run back to back at the speed of the link. The
    caller synchronises before the sources may go."""
    return _Unblocked() if wanted else nullcontext()


class _Unblocked(TorchFunctionMode):  # type: ignore[misc]
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            return func(*args, **{**(kwargs or {}), "non_blocking": True})
        return func(*args, **(kwargs or {}))


class _Rehearsal(TorchFunctionMode):  # type: ignore[misc]
    def __init__(self, model: Any) -> None:
        super().__init__()
        spans: dict[int, tuple[int, str]] = {}
        for name, parameter in model.named_parameters():
            size = parameter.numel() * parameter.element_size()
            if size:
                spans.setdefault(parameter.data_ptr(), (size, name))
        self._begins = sorted(spans)
        self._spans = spans
        self._written: dict[int, set[tuple[int, int]]] = {begin: set() for begin in spans}
        self._found: list[str] = []
        self.problems: list[str] = []
        self.converted: set[str] = set()
        self.writes = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if not _writes(name) or not args or not isinstance(args[0], torch.Tensor):
            return func(*args, **kwargs)
        target = args[0]
        source = next((a for a in (*args[1:], *kwargs.values()) if isinstance(a, torch.Tensor)), None)
        if name == "__setitem__":
            target = target[args[1]]
            source = args[2] if isinstance(args[2], torch.Tensor) else None
        owner = self._owner(target)
        if owner is None:
            return func(*args, **kwargs)
        self._note(owner, target, source)
        return args[0] if name != "__setitem__" and name != "__set__" else None

    def _owner(self, target: Any) -> int | None:
        if target.device.type == "meta" or not target.numel():
            return None
        address = target.data_ptr()
        at = bisect.bisect_right(self._begins, address) - 1
        if at < 0:
            return None
        begin = self._begins[at]
        return begin if address < begin + self._spans[begin][0] else None

    def _note(self, owner: int, target: Any, source: Any) -> None:
        self.writes += 1
        self._written[owner].add((target.data_ptr(), target.numel() * target.element_size()))
        if source is None:
            return
        if _significant(source.shape) != _significant(target.shape):
            self._found.append(
                f"{list(source.shape)} does not fit into {list(target.shape)} of {self._spans[owner][1]}"
            )
        elif source.dtype != target.dtype:
            self.converted.add(self._spans[owner][1])

    def name_problems(self, tensor: str) -> None:
        """What was found since the last call happened while `tensor` was loaded."""
        self.problems.extend(f"tensor {tensor}: {found}" for found in self._found)
        self._found.clear()

    def unwritten(self) -> list[str]:
        missing = [
            f"{name} ({sum(size for _, size in self._written[begin])} of {size_} bytes)"
            for begin, (size_, name) in self._spans.items()
            if sum(size for _, size in self._written[begin]) < size_
        ]
        return [f"parts of the model would keep their old bytes: {some(missing)}"] if missing else []


def _writes(name: str) -> bool:
    return name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__"))


def _significant(shape: Any) -> list[int]:
    return [size for size in shape if size != 1]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:400]
