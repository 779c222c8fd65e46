"""Tries a model's own loading without writing a byte, and keeps what it would have written as a list of copies.

Every SGLang model ends at tensor.copy_ of a source into a slice of a parameter; torch tells of each such call. What is
more than copies (values that are read, tensors that are computed) is left to the model itself, each time."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from sglang_rollout.transfer.comparison import some
from sglang_rollout.transfer.dtypes import DTYPES
from sglang_rollout.transfer.manifest import Tensor

WORD = 8
_READS = frozenset({"item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__"})


class RehearsalImpossible(Exception):
    """This model's loading needs the values, or copies in threads, where it cannot be watched."""


@dataclass(frozen=True)
class Copy:
    """Into `target`, a part of a parameter, goes the part of tensor `name` that begins `offset` elements in.
    `converts`: that one is of another type."""

    target: Any
    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    converts: bool = False

    @property
    def packed(self) -> bool:
        """The source is in one piece."""
        return _packed(self.shape, self.stride)

    @property
    def keeps_words(self) -> bool:
        """The sum of the 64-bit words is the same on both sides: rows of whole words move, uncut and unturned."""
        target, itemsize = self.target, self.target.element_size()
        if self.offset * itemsize % WORD or target.data_ptr() % WORD or target.numel() * itemsize % WORD:
            return False
        if self.packed and target.is_contiguous():
            return True
        straight = self.stride[-1] == 1 and target.stride()[-1] == 1 and tuple(target.shape) == self.shape
        return straight and self.shape[-1] * itemsize % WORD == 0


@dataclass(frozen=True)
class Fill:
    target: Any
    value: float


Step = Copy | Fill


@dataclass(frozen=True)
class Outcome:
    """`problems` forbid loading. `notes`: tensors that the model does not use, types that are converted. `steps` is
    all that loading does, None when it is more than copies, as `more` says."""

    problems: tuple[str, ...]
    notes: tuple[str, ...]
    steps: tuple[Step, ...] | None
    more: str

    @cached_property
    def keeps_words(self) -> bool:
        """The parameters will have the sum of what is loaded, on an engine of one rank."""
        if self.steps is None or self.notes:
            return False
        return all(step.keeps_words if isinstance(step, Copy) else step.value == 0 for step in self.steps)


def rehearse(model: Any, tensors: Iterable[Tensor]) -> Outcome:
    """Runs the model's own load_weights with tensors that have shapes and no values, and keeps every write from
    happening. A write that escapes (from another thread) fails for want of values instead of being done."""
    watch = _Watch(model)
    try:
        with watch:
            model.load_weights(watch.sources(tensors))
    except (NotImplementedError, RuntimeError) as error:
        if "meta" in str(error).lower():
            raise RehearsalImpossible(str(error).splitlines()[0][:200]) from error
        return _refused(watch.now, error)
    except Exception as error:
        return _refused(watch.now, error)
    watch.name_problems()
    problems = (*watch.problems, *watch.unwritten())
    return Outcome(
        problems, watch.notes(), None if watch.more_than_copies else tuple(watch.steps), watch.more_than_copies
    )


def _refused(tensor: str, error: Exception) -> Outcome:
    line = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:400]
    return Outcome((f"the model cannot load tensor {tensor}: {line}",), (), None, "")


class _Watch(TorchFunctionMode):  # type: ignore[misc]
    def __init__(self, model: Any) -> None:
        super().__init__()
        self._spans: dict[int, tuple[int, str]] = {}
        for name, parameter in model.named_parameters():
            size = parameter.numel() * parameter.element_size()
            if size:
                self._spans.setdefault(parameter.data_ptr(), (size, name))
        self._begins = sorted(self._spans)
        self._written: dict[int, set[tuple[int, int]]] = {begin: set() for begin in self._spans}
        self._given: dict[int, tuple[str, Any]] = {}  # by storage
        self._used: dict[str, int] = {}
        self._found: list[str] = []
        self._converted: set[str] = set()
        self.now = ""
        self.problems: list[str] = []
        self.steps: list[Step] = []
        self.more_than_copies = ""

    def sources(self, tensors: Iterable[Tensor]) -> Iterator[tuple[str, Any]]:
        for tensor in tensors:
            self.now = tensor.name
            before = len(self.steps)
            given = torch.empty(tensor.shape, dtype=getattr(torch, DTYPES[tensor.dtype].torch), device="meta")
            self._given[_storage(given)] = (tensor.name, given)
            yield tensor.name, given
            self._used[tensor.name] = len(self.steps) - before
            self.name_problems()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if not _writes(name) or not args or not isinstance(args[0], torch.Tensor):
            result = func(*args, **kwargs)
            if any(self._owner(tensor) is not None for tensor in _tensors((args, kwargs))):
                self._look_at(name, result)
            return result
        target = args[0][args[1]] if name == "__setitem__" else args[0]
        values = args[2:] if name == "__setitem__" else (*args[1:], *kwargs.values())
        if not target.numel():
            return None if name in ("__setitem__", "__set__") else args[0]
        owner = self._owner(target)
        if owner is None:
            self._more(f"{name} of something else than a parameter")
            return func(*args, **kwargs)
        self._note(owner, name, target, values)
        return None if name in ("__setitem__", "__set__") else args[0]

    def _more(self, what: str) -> None:
        self.more_than_copies = self.more_than_copies or f"{what}, at tensor {self.now}"

    def _look_at(self, name: str, result: Any) -> None:
        """Of a parameter: what is no part of it was computed from old weights. Tables that a model looks up, of
        experts for instance, are no parameters."""
        if name in _READS:
            self._more(f"{name} reads values")
        for tensor in _tensors(result):
            if tensor.device.type != "meta" and tensor.numel() and self._owner(tensor) is None:
                self._more(f"{name} makes a tensor with values")

    def _owner(self, target: Any) -> int | None:
        if target.device.type == "meta" or not target.numel():
            return None
        address = target.data_ptr()
        at = bisect.bisect_right(self._begins, address) - 1
        if at < 0:
            return None
        begin = self._begins[at]
        return begin if address < begin + self._spans[begin][0] else None

    def _note(self, owner: int, name: str, target: Any, values: tuple[Any, ...]) -> None:
        self._written[owner].add((target.data_ptr(), target.numel() * target.element_size()))
        source = next((value for value in values if isinstance(value, torch.Tensor)), None)
        if source is None:
            constants = [value for value in values if isinstance(value, int | float)]
            if name not in ("fill_", "zero_", "__setitem__") or (not constants and name != "zero_"):
                self._more(name)
            self.steps.append(Fill(target, constants[0] if constants else 0))
            return
        if _significant(source.shape) != _significant(target.shape):
            self._found.append(
                f"{list(source.shape)} does not fit into {list(target.shape)} of {self._spans[owner][1]}"
            )
        elif source.dtype != target.dtype:
            self._converted.add(self._spans[owner][1])
        known = self._given.get(_storage(source)) if source.device.type == "meta" else None
        if known is None or known[1].dtype != source.dtype or name not in ("copy_", "__setitem__"):
            self._more(f"{name} of a changed source")
            known = ("", None)
        shape, stride, offset = tuple(source.shape), tuple(source.stride()), int(source.storage_offset())
        self.steps.append(Copy(target, known[0], shape, stride, offset, source.dtype != target.dtype))

    def name_problems(self) -> None:
        """What was found since the last call happened while the tensor of `now` was loaded."""
        self.problems.extend(f"tensor {self.now}: {found}" for found in self._found)
        self._found.clear()

    def unwritten(self) -> list[str]:
        sums = {begin: sum(size for _, size in parts) for begin, parts in self._written.items()}
        missing = [
            f"{name} ({sums[begin]} of {size} bytes)"
            for begin, (size, name) in self._spans.items()
            if sums[begin] < size
        ]
        return [f"parts of the model would keep their old bytes: {some(missing)}"] if missing else []

    def notes(self) -> tuple[str, ...]:
        unused = sorted(name for name, count in self._used.items() if not count)
        found = [f"the model makes no use of {some(unused)}"] if unused else []
        if self._converted:
            found.append(f"converted to the model's type: {some(sorted(self._converted))}")
        return tuple(found)


def _tensors(values: Any) -> Iterator[Any]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))


def _writes(name: str) -> bool:
    return name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__"))


def _packed(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def _storage(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


def _significant(shape: Any) -> list[int]:
    return [size for size in shape if size != 1]
