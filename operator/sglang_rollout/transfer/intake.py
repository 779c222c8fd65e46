"""The agent's hold on the process that receives from trainers (intake_child): started ahead, kept over transactions,
killed when it does not obey."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .manifest import Tensor
from .outlast import outlast

STOP_SECONDS = 2.0
START_SECONDS = 120.0  # importing torch takes seconds on a busy machine
GRACE_SECONDS = 10.0  # beyond the order's own deadline, which the child keeps by itself
MAX_LINE = 16 << 20
LAST_LINES = 20


class IntakeRefused(Exception):
    """What was sent is wrong: trying the same again cannot help."""


class IntakeFailed(Exception):
    """The sender was lost or too slow, or the receiving process died."""


@dataclass(frozen=True)
class Intake:
    """What to receive, and into which slot. senders: host:port in their order. transport: as in the API, "Auto" or a
    name. members: agents that the senders will hear from. algorithm: the digest to prefer. reference: what the running
    model has; tied_names may be there or not. receiver: this pod's name."""

    transaction: str
    version: str
    senders: tuple[str, ...]
    slot: str
    receiver: str
    transport: str = "Auto"
    members: int = 1
    epoch: int = 0
    ranks: int = 1
    algorithm: str = ""
    reference: Mapping[str, Tensor] | None = None
    tied_names: frozenset[str] = frozenset()
    allow_nonfinite: bool = False
    timeout_seconds: float = 300.0


@dataclass(frozen=True)
class Received:
    """The slot is sealed. size in bytes; nonfinite: values that are Inf or NaN."""

    root: str
    size: int
    nonfinite: int


class TrainerIntake:
    """Not for two receives at once."""

    def __init__(
        self, stage_folder: Path, *, python: str = sys.executable, env: Mapping[str, str] | None = None
    ) -> None:
        """python: an interpreter that has torch; the engine's own, in a pod."""
        self._folder = stage_folder
        self._python = python
        self._env = dict(os.environ if env is None else env)
        self._process: asyncio.subprocess.Process | None = None
        self._said: deque[str] = deque(maxlen=LAST_LINES)
        self._errors: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._serial = 0

    async def warm(self) -> None:
        """Starts the process, if it is not there, and returns when it is ready. Raises IntakeFailed."""
        async with self._starting:
            if self._process is not None and self._process.returncode is None:
                return
            await self.close()
            try:
                self._process = await asyncio.create_subprocess_exec(
                    self._python, "-m", "sglang_rollout.transfer.intake_child", "--folder", str(self._folder),
                    stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
                    env=self._env, limit=MAX_LINE,
                )  # fmt: skip
            except OSError as error:
                raise IntakeFailed(f"the receiving process cannot be started: {error}") from error
            self._errors = asyncio.create_task(self._keep_errors(self._process))
            try:
                await self._answer(START_SECONDS)
            except BaseException:
                await self.close()
                raise

    async def receive(self, intake: Intake, progress: Callable[[int, int], None] = lambda done, of: None) -> Received:
        """progress gets bytes staged and bytes in all, 0 where not known. Raises IntakeRefused, IntakeFailed; after
        either, and when cancelled, the slot holds nothing and nothing writes to it."""
        await self.warm()
        self._serial += 1
        serial = self._serial
        total = sum(tensor.size for tensor in (intake.reference or {}).values())
        deadline = asyncio.get_running_loop().time() + intake.timeout_seconds + GRACE_SECONDS
        try:
            await self._order({"id": serial, "receive": _words(intake)})
            while True:
                answer = await self._answer(deadline - asyncio.get_running_loop().time())
                if answer.get("id") != serial:
                    continue  # the rest of one that was stopped
                await self._look_at_wear(answer)
                if "progress" in answer:
                    progress(int(answer["progress"]), total)
                elif "received" in answer:
                    return Received(**answer["received"])
                elif "refused" in answer:
                    raise IntakeRefused(str(answer["refused"]))
                else:
                    raise IntakeFailed(str(answer.get("failed", "the receiving process gave up")))
        except asyncio.CancelledError:
            await outlast(asyncio.ensure_future(self._stop(serial)))
            raise

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        if process is not None:
            await process.wait()
        if self._errors is not None:
            await asyncio.gather(self._errors, return_exceptions=True)
            self._errors = None

    async def _stop(self, serial: int) -> None:
        if self._process is None:
            return
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._order({"id": -serial, "stop": True})
                while (answer := await self._answer(STOP_SECONDS)).get("id") != -serial:
                    pass
                await self._look_at_wear(answer)
        except (TimeoutError, IntakeFailed):
            await self.close()

    async def _look_at_wear(self, answer: Mapping[str, Any]) -> None:
        """A worn process ends by itself, since something in it may still write to the slot: not before that is the slot
        anybody's."""
        if answer.get("worn"):
            await self.close()

    async def _order(self, words: dict[str, Any]) -> None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(words).encode() + b"\n")
            async with asyncio.timeout(STOP_SECONDS):
                await process.stdin.drain()
        except (OSError, TimeoutError) as error:
            await self._died(f"takes no orders: {error!r}")

    async def _answer(self, seconds: float) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(max(seconds, 0.0)):
                line = await process.stdout.readline()
            if line:
                answer: dict[str, Any] = json.loads(line)
                return answer
        except TimeoutError:
            await self._died(f"has not answered for {seconds:.0f} s")
        except ValueError as error:
            await self._died(f"answers nonsense: {error}")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()
        await self._died(f"ended with {process.returncode}")
        raise AssertionError("unreachable")

    async def _died(self, what: str) -> None:
        await self.close()
        last = " / ".join(list(self._said)[-3:])
        raise IntakeFailed(f"the receiving process {what}" + (f"; its last words: {last}" if last else ""))

    async def _keep_errors(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while line := await process.stderr.readline():
            text = line.decode(errors="replace").rstrip()
            self._said.append(text)
            print(f"intake: {text}", file=sys.stderr)


def _words(intake: Intake) -> dict[str, Any]:
    reference = None
    if intake.reference is not None:
        reference = [[t.name, t.dtype, list(t.shape)] for t in intake.reference.values()]
    return {
        "transaction": intake.transaction,
        "version": intake.version,
        "senders": list(intake.senders),
        "slot": intake.slot,
        "receiver": intake.receiver,
        "transport": intake.transport,
        "members": intake.members,
        "epoch": intake.epoch,
        "ranks": intake.ranks,
        "algorithm": intake.algorithm,
        "reference": reference,
        "tied_names": sorted(intake.tied_names),
        "allow_nonfinite": intake.allow_nonfinite,
        "timeout": intake.timeout_seconds,
    }
