"""GPU memory that torch did not allocate, as a tensor. Needs torch."""

from __future__ import annotations

from typing import Any

import torch

from .cuda_driver import ordinal_at


def flat_at(address: int, size: int) -> Any:
    """Bytes at an address that CudaDriver gave out, as they lie there; the caller keeps them mapped. They count as
    memory of the GPU in whose context they are mapped, which may be another one than they lie on: only there can
    they be read and written."""
    device = torch.device("cuda", ordinal_at(address))
    # torch.as_tensor asks the driver for the device instead, and copies what is not on the current one.
    storage = torch._C._construct_storage_from_data_pointer(address, device, size)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (size,), (1,))
