"""python3 -m sglang_rollout.transfer.intake_child: receives from trainers, apart from the agent, since a collective
that is broken off may take its process along. Orders and answers are lines of JSON on stdin and stdout."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from .manifest import tensor_of
from .receiver import GroupCache, Receiving, ReceivingFailed, WeightsRefused, receive
from .stage import Stage
from .stage_index import StageUnusable
from .transports import Transport
from .transports.available import agent_transports, stuck

MAX_LINE = 256 << 20
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class _Child:
    def __init__(self, folder: Path, answer: Callable[[dict[str, Any]], None]) -> None:
        self._folder = folder
        self._answer = answer
        self._cache = GroupCache()
        self._transports: list[Transport] = []
        self._stage: Stage | None = None
        self._work: asyncio.Task[None] | None = None

    @staticmethod
    def import_now() -> None:
        """What takes seconds on a busy machine. No GPU is touched before there is something to receive."""
        with contextlib.suppress(ImportError):
            import_module("torch.distributed")

    def _find_transports(self) -> list[Transport]:
        found = agent_transports(self._folder)
        for transport in found:
            transport.offer()
        return found

    async def obey(self, line: bytes) -> None:
        order = json.loads(line)
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)
            self._work = None
        if "receive" in order:
            self._work = asyncio.create_task(self._receive(order["id"], order["receive"]))
        else:
            self._end(order["id"], stopped=True)

    async def _receive(self, identity: int, words: dict[str, Any]) -> None:
        try:
            order = _order(words, lambda done: self._answer({"id": identity, "progress": done}))
            stage = self._open()
            # In a thread: on a GPU it takes a while, in which the event loop would beat for nobody.
            self._transports = self._transports or await asyncio.to_thread(self._find_transports)
            manifest, nonfinite = await receive(stage, self._transports, self._cache, order)
            found = {"root": manifest.root, "size": manifest.size, "nonfinite": nonfinite}
            self._end(identity, received=found)
        except WeightsRefused as error:
            self._end(identity, refused=str(error))
        except ReceivingFailed as error:
            self._end(identity, failed=str(error))
        except StageUnusable as error:
            self._end(identity, failed=str(error))
        except Exception as error:
            logging.exception("receiving failed in a way that nobody foresaw")
            self._end(identity, failed=f"{type(error).__name__}: {error}")

    def _open(self) -> Stage:
        # Kept open: mapping a stage anew costs a fault for each of its pages.
        if self._stage is None:
            self._stage = Stage(self._folder, _driver(self._folder))
        return self._stage

    def _end(self, identity: int, **what: Any) -> None:
        worn = stuck()
        self._answer({"id": identity, "worn": worn, **what})
        if worn:  # what is stuck may write into the stage when its peer wakes up
            os._exit(0)


def _order(words: dict[str, Any], progress: Callable[[int], None]) -> Receiving:
    reference = words.pop("reference")
    tied = frozenset(words.pop("tied_names"))
    senders = tuple(words.pop("senders"))
    tensors = None if reference is None else {one[0]: tensor_of(*one) for one in reference}
    return Receiving(**words, reference=tensors, tied_names=tied, senders=senders, progress=progress)


def _driver(folder: Path) -> Any:
    from .stage_index import read_index

    if not any(region.gpu for slot in read_index(folder).slots for region in slot.regions):
        return None
    from .cuda_driver import CudaDriver
    from .transports.available import home_of

    gpus = {region.gpu for slot in read_index(folder).slots for region in slot.regions if region.gpu}
    return CudaDriver(home_of(gpus))


async def _serve(folder: Path) -> None:
    # Libraries print to standard output; the answers go where it was.
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        out.write(json.dumps(message).encode() + b"\n")

    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=MAX_LINE)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    child = _Child(folder, answer)
    child.import_now()
    answer({"ready": os.getpid()})
    while line := await reader.readline():
        await child.obey(line)
    # The agent has gone, and its next one fills the same slots: no thread may be waited for.
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="intake_child")
    parser.add_argument("--folder", type=Path, required=True, help="of the stage")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    _end_with_parent()
    with contextlib.suppress(BrokenPipeError):
        asyncio.run(_serve(given.folder))
    os._exit(0)  # nothing here is worth waiting for a thread that is stuck in a collective


def _end_with_parent() -> None:
    """Also when this process cannot look at its input just then."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
