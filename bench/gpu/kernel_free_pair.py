"""python -m bench.gpu.kernel_free_pair JSON: two processes, on two GPUs or on one, of which one takes the other's
bytes in one of the ways below. Orders on standard input and answers are lines of JSON; times are time.monotonic()."""

from __future__ import annotations

import ctypes
import importlib
import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as distributed

from sglang_rollout.transfer.cuda_driver import CudaDriver

GIVER, TAKER = 0, 1
ROLES = ("giver", "taker")
POLL_SECONDS = 0.0001
SPARE = 2 << 30  # before the bytes: a scatter to two has a first part, which is nobody's
BYTES = 1  # ncclUint8
SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC


class Side:
    """One of the two processes. gpus: the giver's and the taker's, of those that both see; the same one, or two."""

    def __init__(self, role: int, pipe: Connection, given: dict[str, Any]) -> None:
        self.role, self.pipe = role, pipe
        self.size = int(given["size"])
        self.cuda = bool(given["cuda"])
        self.nixl = str(given.get("nixl") or "")
        self.gpus: list[int] = given["gpus"] if self.cuda else [0, 0]
        self.gpu = self.gpus[role]
        self.flat: Any = None
        if self.cuda:
            torch.cuda.set_device(self.gpu)
            self.driver = CudaDriver(self.gpu)
            self.stream = torch.cuda.Stream(self.gpu)

    def hold(self) -> None:
        """Memory of this side; on a GPU such as can be exported."""
        if self.cuda:
            self.address = self.driver.allocate(self.size)
            self.flat = _flat(self.address, self.size, self.gpu)
        else:
            self.flat = torch.zeros(self.size, dtype=torch.uint8)
            self.address = self.flat.data_ptr()

    def meet(self) -> None:
        """Both sides get to know each other."""

    def move(self, bucket: int) -> None:
        """All bytes once; returns when this side has done its part."""

    def pieces(self, bucket: int) -> Iterator[tuple[int, int]]:
        for begin in range(0, self.size, bucket):
            yield begin, min(bucket, self.size - begin)


class Gloo(Side):
    """On CPU, what NCCL is on GPUs."""

    def meet(self) -> None:
        port = _port() if self.role == GIVER else 0
        port = port or self.pipe.recv()
        if self.role == GIVER:
            self.pipe.send(port)
        distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=2, rank=self.role)

    def move(self, bucket: int) -> None:
        for begin, length in self.pieces(bucket):
            distributed.broadcast(self.flat[begin : begin + length], GIVER)


class _UniqueId(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 128),)


class Nccl(Side):
    """Broadcast; by NCCL itself, since torch does not offer all of it."""

    def meet(self) -> None:
        self._nccl: Any = ctypes.CDLL("libnccl.so.2")  # the one that torch has loaded
        self._nccl.ncclGetErrorString.restype = ctypes.c_char_p
        self._nccl.ncclGetLastError.restype = ctypes.c_char_p
        identity = _UniqueId()
        if self.role == GIVER:
            self.call("ncclGetUniqueId", ctypes.byref(identity))
            self.pipe.send(bytes(identity))
        else:
            identity = _UniqueId.from_buffer_copy(self.pipe.recv())
        self.comm = ctypes.c_void_p()
        self.call("ncclCommInitRank", ctypes.byref(self.comm), 2, identity, self.role)

    def move(self, bucket: int) -> None:
        for begin, length in self.pieces(bucket):
            at = self.address + begin
            self.collective("ncclBroadcast", at, at, length)
        self.stream.synchronize()

    def collective(self, name: str, source: int, into: int, count: int) -> None:
        stream = ctypes.c_void_p(self.stream.cuda_stream)
        pointers = ctypes.c_void_p(source), ctypes.c_void_p(into)
        self.call(name, *pointers, ctypes.c_size_t(count), BYTES, GIVER, self.comm, stream)

    def call(self, name: str, *arguments: Any) -> None:
        """Raises RuntimeError."""
        if result := getattr(self._nccl, name)(*arguments):
            said = self._nccl.ncclGetErrorString(result), self._nccl.ncclGetLastError(None)
            raise RuntimeError(f"{name}: " + "; ".join((text or b"").decode() for text in said))


class NcclCopyEngines(Nccl):
    """Scatter, the only collective from one to others that NCCL 2.28 to 2.30 can leave to copy engines: between GPUs
    of one NVLink domain, in windows that all register, with NCCL_CTA_POLICY=2 and NCCL_CUMEM_ENABLE=1."""

    def hold(self) -> None:
        """Once there is a communicator: the windows are registered with it."""

    def meet(self) -> None:
        super().meet()
        base, window = ctypes.c_void_p(), ctypes.c_void_p()
        whole = ctypes.c_size_t(SPARE + self.size)
        self.call("ncclMemAlloc", ctypes.byref(base), whole)
        self.call("ncclCommWindowRegister", self.comm, base, whole, ctypes.byref(window), SYMMETRIC)
        if not window.value:
            raise RuntimeError("ncclCommWindowRegister gave no window: no symmetric memory here")
        self.address = int(base.value or 0) + SPARE
        self.flat = _flat(self.address, self.size, self.gpu)

    def move(self, bucket: int) -> None:
        for begin, length in self.pieces(bucket):
            at = self.address + begin
            # In place: the giver's own part is what lies before and is not touched, the second one is the taker's.
            self.collective("ncclScatter", at - length, at - length if self.role == GIVER else at, length)
        self.stream.synchronize()


class PeerCopy(Side):
    """CUDA IPC: the taker opens the giver's memory and copies; no kernel runs."""

    streams = 1  # that each bucket is divided among

    def meet(self) -> None:
        if self.role == GIVER:
            self.pipe.send(self.driver.export(self.address))
        else:
            self._theirs = _flat(self.driver.open(self.pipe.recv()), self.size, self.gpu)

    def move(self, bucket: int) -> None:
        if self.role != TAKER:
            return
        streams = [torch.cuda.Stream(self.gpu) for _ in range(self.streams)] if self.cuda else []
        for begin, length in self.pieces(bucket):
            step = -(-length // self.streams)
            for stream, at in zip(streams, range(begin, begin + length, step), strict=False):
                part = slice(at, min(at + step, begin + length))
                with torch.cuda.stream(stream):
                    self.flat[part].copy_(self._theirs[part], non_blocking=True)
        for stream in streams:
            stream.synchronize()


class PeerCopy2(PeerCopy):
    streams = 2


class PeerCopy4(PeerCopy):
    streams = 4


class Nixl(Side):
    """NIXL over UCX, by READ: the taker says what it wants, the giver's process is not asked."""

    def meet(self) -> None:
        sys.path.append(self.nixl)
        nixl = importlib.import_module("nixl_cu13")
        self._agent: Any = nixl.nixl_agent(ROLES[self.role], nixl.nixl_agent_config(backends=["UCX"]))
        self._kind = "VRAM" if self.cuda else "DRAM"
        self._ready: dict[int, list[Any]] = {}
        self._registered = self._agent.register_memory([(self.address, self.size, self.gpu, "")], self._kind)
        if self.role == GIVER:
            self.pipe.send((self._agent.get_agent_metadata(), self.address))
        else:
            metadata, self._from = self.pipe.recv()
            self._peer = self._agent.add_remote_agent(metadata)

    def move(self, bucket: int) -> None:
        if self.role == GIVER:
            return
        handles = self._ready.get(bucket) or self._ready.setdefault(bucket, self._prepared(bucket))
        going = [handle for handle in handles if self._state(self._agent.transfer(handle))]
        while going:
            time.sleep(POLL_SECONDS)
            going = [handle for handle in going if self._state(self._agent.check_xfer_state(handle))]

    def _prepared(self, bucket: int) -> list[Any]:
        here, there = self.gpu, self.gpus[GIVER]
        return [
            self._agent.initialize_xfer(
                "READ",
                self._agent.get_xfer_descs([(self.address + begin, length, here)], self._kind),
                self._agent.get_xfer_descs([(self._from + begin, length, there)], self._kind),
                self._peer,
            )
            for begin, length in self.pieces(bucket)
        ]

    def _state(self, word: str) -> bool:
        """Whether it still goes on. Raises RuntimeError."""
        if word not in ("DONE", "PROC"):
            raise RuntimeError(f"NIXL says {word}")
        return word == "PROC"


WAYS: dict[str, type[Side]] = {
    "Gloo": Gloo,
    "NCCL": Nccl,
    "NCCL copy engines": NcclCopyEngines,
    "NCCL P2P by memcpy": Nccl,
    "PeerCopy": PeerCopy,
    "PeerCopy, 2 streams": PeerCopy2,
    "PeerCopy, 4 streams": PeerCopy4,
    "NIXL": Nixl,
}


def main() -> None:
    given = json.loads(sys.argv[1])
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    giver = multiprocessing.get_context("spawn").Process(target=_give, args=(theirs, given), daemon=True)
    giver.start()
    theirs.close()
    taker = WAYS[given["way"]](TAKER, ours, given)
    taker.hold()
    taker.meet()
    taker.flat.zero_()
    expected = ours.recv()
    took = [_moved(taker, bucket) for bucket in given["buckets"]]  # opens what has to be opened once
    verdict = "the bytes are right" if _sum(taker) == expected else "BYTES DIFFER"
    print(json.dumps({"bytes": verdict, "first": took}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        begin = time.monotonic()
        each = [_moved(taker, order["bucket"]) for _ in range(order["repeats"])]
        print(json.dumps({"begin": begin, "end": time.monotonic(), "each": each}), flush=True)
    os._exit(0)  # its libraries may wait for the giver


def _moved(taker: Side, bucket: int) -> float:
    """Seconds, from the order to both until both have done it."""
    begin = time.monotonic()
    taker.pipe.send(bucket)
    taker.move(bucket)
    taker.pipe.recv()
    return time.monotonic() - begin


def _give(pipe: Connection, given: dict[str, Any]) -> None:
    giver = WAYS[given["way"]](GIVER, pipe, given)
    giver.hold()
    giver.meet()
    words = giver.flat[: giver.size // 4 * 4].view(torch.int32)
    for begin in range(0, words.numel(), 1 << 28):
        words[begin : begin + (1 << 28)].random_()
    pipe.send(_sum(giver))
    with suppress(EOFError):  # the taker has ended
        while True:
            giver.move(pipe.recv())
            pipe.send("done")


def _sum(side: Side) -> int:
    """Of all whole words, wrapped."""
    words = side.flat[: side.size // 8 * 8].view(torch.int64)
    found = int(words.sum().item())
    if side.cuda:
        torch.cuda.synchronize(side.gpu)
    return found


def _flat(address: int, size: int, ordinal: int) -> Any:
    """GPU memory that torch did not allocate, as bytes; used from this GPU, on whichever it lies."""
    device = torch.device("cuda", ordinal)
    storage = torch._C._construct_storage_from_data_pointer(address, device, size)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (size,), (1,))


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
