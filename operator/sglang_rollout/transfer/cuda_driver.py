"""The few calls of the CUDA driver that staging needs, by ctypes: plain device memory that other processes can open,
and copies into it. Standard library only, so that a process which only holds memory needs no torch."""

from __future__ import annotations

import bisect
import ctypes
import threading
from typing import Any

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_REGISTER_PORTABLE = 1


class CudaError(Exception):
    """A call of the driver failed; says which and the driver's word for it."""


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class _Uuid(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 16),)


class CudaDriver:
    """The driver with the primary context of one GPU, the one that torch uses in this process. From any thread."""

    def __init__(self, ordinal: int = 0) -> None:
        """`ordinal` among the GPUs that this process sees. Raises CudaError."""
        try:
            self._cuda: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError(f"there is no CUDA driver here: {error}") from error
        self._context: ctypes.c_void_p | None = None
        self._call("cuInit", 0)
        device, context, uuid = ctypes.c_int(), ctypes.c_void_p(), _Uuid()
        self._call("cuDeviceGet", ctypes.byref(device), ordinal)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuDeviceGetUuid_v2", ctypes.byref(uuid), device)
        self._context = context
        self._ordinal = ordinal
        self.gpu = gpu_name(bytes(uuid.bytes))

    def allocate(self, size: int) -> int:
        """Address of device memory that can be exported; what torch's allocators give may not be."""
        pointer = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        _mapped.add(pointer.value, self._ordinal)
        return pointer.value

    def free(self, address: int) -> None:
        _mapped.remove(address)
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def export(self, address: int) -> str:
        handle = _IpcHandle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle).hex()

    def open(self, handle: str) -> int:
        """Address in this process of what another one exported, from whichever GPU: it is mapped for this driver's. The
        same process cannot open its own."""
        raw = bytes.fromhex(handle)
        if len(raw) != HANDLE_BYTES:
            raise CudaError(f"an IPC handle has {HANDLE_BYTES} bytes, this one {len(raw)}")
        pointer = ctypes.c_uint64()
        value = _IpcHandle.from_buffer_copy(raw)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), value, ctypes.c_uint(_LAZY_PEER_ACCESS))
        _mapped.add(pointer.value, self._ordinal)
        return pointer.value

    def close(self, address: int) -> None:
        _mapped.remove(address)
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def copy_in(self, address: int, host: int, size: int) -> None:
        """From host memory to the device; the bytes are there when it returns."""
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), ctypes.c_void_p(host), ctypes.c_size_t(size))
        self._call("cuCtxSynchronize")

    def copy_out(self, host: int, address: int, size: int) -> None:
        self._call("cuMemcpyDtoH_v2", ctypes.c_void_p(host), ctypes.c_uint64(address), ctypes.c_size_t(size))

    def register(self, host: int, size: int) -> None:
        """Pins host memory, for copies at the speed of the link. Takes a second for 16 GB that are already touched."""
        self._call(
            "cuMemHostRegister_v2", ctypes.c_void_p(host), ctypes.c_size_t(size), ctypes.c_uint(_REGISTER_PORTABLE)
        )

    def unregister(self, host: int) -> None:
        self._call("cuMemHostUnregister", ctypes.c_void_p(host))

    def _call(self, name: str, *arguments: Any) -> None:
        # A context is current to one thread; making it so again costs nothing.
        result = self._cuda.cuCtxSetCurrent(self._context) if self._context else 0
        result = result or getattr(self._cuda, name)(*arguments)
        if result:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(result, ctypes.byref(text))
            raise CudaError(f"{name}: {(text.value or b'error').decode()} ({result})")


class _Mapped:
    """Where memory begins that this process has allocated or opened, and for which GPU it is mapped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: list[tuple[int, int]] = []

    def add(self, address: int, ordinal: int) -> None:
        with self._lock:
            bisect.insort(self._found, (address, ordinal))

    def remove(self, address: int) -> None:
        """Once for each time that it was added."""
        with self._lock:
            at = bisect.bisect_left(self._found, (address, 0))
            if at < len(self._found) and self._found[at][0] == address:
                del self._found[at]

    def ordinal_at(self, address: int) -> int:
        with self._lock:
            before = bisect.bisect_right(self._found, address, key=lambda one: one[0])
            if not before:
                raise CudaError(f"nothing at {address:#x} was allocated or opened by this process")
            return self._found[before - 1][1]


_mapped = _Mapped()


def ordinal_at(address: int) -> int:
    """The GPU for which memory is mapped that begins at `address` or before: where work on it must run. Raises
    CudaError."""
    return _mapped.ordinal_at(address)


def gpu_name(raw: bytes) -> str:
    """A GPU's UUID as nvidia-smi and NVIDIA_VISIBLE_DEVICES write it."""
    text = raw.hex()
    return "GPU-" + "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def gpu_count() -> int:
    """GPUs that this process may use; CUDA_VISIBLE_DEVICES counts. Raises CudaError when there is no driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(f"there is no CUDA driver here: {error}") from error
    count = ctypes.c_int()
    if result := cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        raise CudaError(f"the CUDA driver shows no GPU (error {result})")
    return count.value
