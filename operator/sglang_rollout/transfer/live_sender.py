"""The trainer's side of Direct and Colocated: tells each agent what it would give, and gives it bucket by bucket when
the agent asks, which it does with its engine paused."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from .giving import Giving
from .link import Link
from .live_weights import LiveWeights, WeightsChanged
from .reception import ENDED, Arrivals, Reception, refuse
from .sender import Delivery
from .session import (
    Contents,
    Hello,
    Joined,
    Message,
    Next,
    Payload,
    Ready,
    Refused,
    Sealed,
    SessionError,
    Took,
    Welcome,
)
from .transports import TransportBroken, TransportUnable

log = logging.getLogger(__name__)

STUCK_SECONDS = 5.0  # after which the thread of an aborted transfer is left to itself


class WrongForEngine(Exception):
    """An engine's model has other tensors; the sentence names them."""


@dataclass
class LiveSending:
    """One version, to every agent that asks for it. `giving` makes what one agent's engine gets its buckets by, and
    is told when it is over whether it can be used again. `mode` as in Hello."""

    version: str
    mode: str
    weights: LiveWeights
    open_giving: Callable[[Link, Hello], Giving]
    close_giving: Callable[[Hello, Giving, bool], None] = lambda hello, giving, good: None
    timeout: float = 300.0
    aliases: dict[str, str] = field(default_factory=dict)


class LiveSender:
    """Serves until it is closed; `deliveries` tell how it went with each agent so far."""

    def __init__(self, sending: LiveSending) -> None:
        self._sending = sending
        self._ends_at = time.monotonic() + sending.timeout
        self._began = time.monotonic()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.deliveries: dict[str, Delivery] = {}
        self.wrong = asyncio.Event()
        self.wrong_sentence = ""

    async def serve(self, reception: Reception) -> None:
        """Until cancelled: the operator decides when a version is over. Raises WrongForEngine as soon as one agent
        finds that the weights are not for its model."""
        with reception.expecting(self._sending.version, self._sending.mode) as arrivals:
            wrong = asyncio.create_task(self.wrong.wait())
            greeting = asyncio.create_task(self._greet(arrivals))
            try:
                await asyncio.wait({wrong, greeting}, return_when=asyncio.FIRST_COMPLETED)
                if greeting.done():
                    greeting.result()
                raise WrongForEngine(self.wrong_sentence)
            finally:
                for task in (wrong, greeting):
                    task.cancel()
                await asyncio.wait({wrong, greeting})
                for receiver in list(self._tasks):
                    await self._end(receiver)
                await arrivals.turn_away()

    async def _greet(self, arrivals: Arrivals) -> None:
        while True:
            link, hello = await arrivals.next()
            try:
                await self._end(hello.receiver)  # the same agent again: its last conversation is over
            except asyncio.CancelledError:
                await refuse(link, ENDED)
                raise
            self._tasks[hello.receiver] = asyncio.create_task(self._converse(link, hello))

    async def _end(self, receiver: str) -> None:
        task = self._tasks.pop(receiver, None)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _converse(self, link: Link, hello: Hello) -> None:
        conversation = _Conversation(self._sending, link, hello, self._ends_at)
        reason = ""
        try:
            await conversation.run()
        except WrongForEngine as error:
            reason = self.wrong_sentence = str(error)
            self.wrong.set()
        except (SessionError, TransportBroken, TransportUnable, WeightsChanged, TimeoutError) as error:
            reason = str(error) or "not in time"
        except asyncio.CancelledError:
            reason = ENDED
            raise
        except Exception as error:
            log.exception("sending to %s failed", hello.receiver)
            reason = f"the trainer failed while sending: {type(error).__name__}: {error}"
        finally:
            self.deliveries[hello.receiver] = Delivery(hello.receiver, reason, time.monotonic() - self._began)
            await conversation.close(reason)


class _Conversation:
    def __init__(self, sending: LiveSending, link: Link, hello: Hello, ends_at: float) -> None:
        self._sending = sending
        self._link = link
        self._hello = hello
        self._ends_at = ends_at
        self._giving: Giving | None = None
        self._good = True  # the group may be used for the next version
        self._thread = ThreadPoolExecutor(1, "weights-live")  # of its own: another engine's may stand still

    async def run(self) -> str:
        """Returns the root that the agent's engine holds."""
        sending, hello, link = self._sending, self._hello, self._link
        giving = self._giving = sending.open_giving(link, hello)
        manifest = sending.weights.manifest
        details = giving.details()
        if bad := sending.weights.nonfinite_words():
            details["nonfinite"] = bad
        await link.send(Welcome(giving.transport, giving.group, 1, 1 + hello.ranks, manifest.algorithm, details))
        # Made while the engine still runs: its pause may come as soon as the agent knows what will be given.
        await self._in_thread(giving.look_ahead, 0)
        await link.send(Contents(manifest.to_json().decode()))
        while True:
            said: Message = await self._link.receive(self._left())
            match said:
                case Joined(group) if group == giving.group:
                    await self._in_thread(giving.join, self._left())
                    await link.send(Joined(group))
                case Ready():  # it asks whether we are still there
                    await link.send(said)
                case Next(number) if 0 <= number < len(manifest.buckets):
                    self._good = False
                    details, blob = await self._in_thread(giving.prepare, number)
                    await link.send(Payload(number, details), blob)
                    self._look_ahead(number + 1)
                    await self._in_thread(giving.give, number, self._left())
                    if sending.mode == "direct":
                        giving.taken(number)
                        await link.send(Took(number))
                case Took(number) if sending.mode == "colocated":
                    giving.taken(number)
                case Sealed(root):
                    self._good = True
                    return root
                case Refused(reason, _, True):
                    raise WrongForEngine(reason)
                case Refused(reason):
                    raise SessionError(reason)
                case _:
                    raise SessionError(f"{hello.receiver} said {said.kind} out of turn")

    def _look_ahead(self, number: int) -> None:
        """The next bucket is made while one travels; what goes wrong with it is told when it is asked for."""
        giving = self._giving
        if giving is not None and number < len(self._sending.weights.manifest.buckets):
            making = asyncio.ensure_future(asyncio.to_thread(giving.look_ahead, number))
            making.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _left(self) -> float:
        return max(self._ends_at - time.monotonic(), 0.01)

    async def _in_thread(self, call: Callable[..., Any], *words: Any) -> Any:
        """What blocks, and ends soon after the agent has gone: its engine will never come."""
        work = asyncio.get_running_loop().run_in_executor(self._thread, call, *words)
        try:
            while not work.done():
                await asyncio.wait([work], timeout=0.2)
                if not work.done() and (lost := self._link.lost):
                    raise lost
            return work.result()
        finally:
            if not work.done():
                self._good = False
                assert self._giving is not None
                self._giving.abort()
                await asyncio.wait([work], timeout=STUCK_SECONDS)
                work.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def close(self, reason: str) -> None:
        """`reason`: why it ended before its end."""
        self._thread.shutdown(wait=False)
        if self._giving is not None:
            if not self._good:
                self._giving.abort()
            self._sending.close_giving(self._hello, self._giving, self._good)
        if reason:
            await refuse(self._link, reason)
        else:
            await self._link.close()
