"""A bucket as SGLang's /update_weights_from_tensor takes it ("flattened_bucket"): by value, or as a CUDA IPC handle
that an engine on the same GPUs opens. Needs torch, but not SGLang."""

from __future__ import annotations

import io
import os
import pickle
from typing import Any

from .dtypes import DTYPES
from .manifest import Bucket

# SGLang opens no pickle of other classes than those that it knows; it looks this one up by its name.
_METADATA = b"csglang.srt.weight_sync.tensor_bucket\nFlattenedTensorMetadata\n"
_PROTOCOL = 3  # the last without frames: what was written before can be gone on with
_DEVICE = 6  # of the arguments of torch.multiprocessing.reductions.rebuild_cuda_tensor


class _Metadata:
    """Stands for SGLang's class of that name."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class _Pickler(pickle._Pickler):
    """The one of pure Python: it lets a class be written under another name."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if obj is _Metadata:
            self.write(_METADATA)  # type: ignore[attr-defined]
            self.memoize(obj)  # type: ignore[attr-defined]
        else:
            super().save_global(obj, name)  # type: ignore[misc]

    def reducer_override(self, obj: Any) -> Any:
        import torch
        from torch.multiprocessing.reductions import reduce_tensor

        if obj is _Metadata:
            return _Metadata.__name__  # by way of save_global
        if not (isinstance(obj, torch.Tensor) and obj.is_cuda):
            return NotImplemented
        rebuild, arguments = reduce_tensor(obj)
        if isinstance(arguments[_DEVICE], str):  # SGLang is in this process and has seen to it
            return rebuild, arguments
        # The two processes may count their GPUs differently; SGLang takes the UUID in place of the number.
        uuid = str(torch.cuda.get_device_properties(arguments[_DEVICE]).uuid)
        return rebuild, (*arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :])


class Entries:
    """Of one bucket. What is the same in each is written once, before the pause: it takes 20 us a tensor."""

    def __init__(self, bucket: Bucket) -> None:
        import torch

        self._begin = io.BytesIO()
        pickler: Any = _Pickler(self._begin, _PROTOCOL)
        self._begin.write(pickle.PROTO + bytes([_PROTOCOL]) + pickle.EMPTY_DICT + pickle.MARK)
        pickler.save("metadata")
        pickler.save(
            [
                _Metadata(
                    name=tensor.name,
                    shape=torch.Size(tensor.shape),
                    dtype=getattr(torch, DTYPES[tensor.dtype].torch),
                    start_idx=offset,
                    end_idx=offset + tensor.size,
                    numel=tensor.size,
                )
                for tensor, offset in bucket.placed()
            ]
        )
        self._memo = pickler.memo

    def entry(self, flat: Any) -> bytes:
        """For one rank: each needs its own, since whoever opens a CUDA handle counts it down once. `flat` in GPU memory
        must be kept until the engine has answered, and its bytes must be there already."""
        file = io.BytesIO()
        file.write(self._begin.getbuffer())
        pickler: Any = _Pickler(file, _PROTOCOL)
        pickler.memo = dict(self._memo)
        pickler.save("flattened_tensor")
        pickler.save(flat)
        file.write(pickle.SETITEMS + pickle.STOP)
        return file.getvalue()


def shareable(size: int, device: Any) -> Any:
    """A buffer that another process can open if it is in GPU memory: neither memory that can be released
    (torch_memory_saver) nor expandable segments can be."""
    import torch

    collect()  # of an earlier version, what engines have let go of only since
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
    if "expandable_segments:True" not in settings:
        return torch.empty(size, dtype=torch.uint8, device=device)
    torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    try:
        return torch.empty(size, dtype=torch.uint8, device=device)
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")


def collect() -> None:
    """What engines have let go of can be used again by this process."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.ipc_collect()


def give_back() -> None:
    """What engines have let go of, to the GPU: an engine there may wait for it, for its KV cache."""
    import torch

    collect()
    torch.cuda.empty_cache()  # nothing where CUDA is not in use
