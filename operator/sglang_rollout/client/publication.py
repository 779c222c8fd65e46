"""One version on its way into a fleet: the resource asks for it, this process sends it, and what the operator makes of
it is watched meanwhile. Whatever ends a call early, an error, Ctrl-C or a cancelled task, spec.weights is put back
unless the fleet has decided."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

from ..transfer.manifest import ManifestRefused
from ..transfer.sender import SendFailed, Sending, SendReport, send
from .asking import Asked, Asking, Halted
from .errors import FleetUnreachable, PublishFailed, PublishRefused, PublishTimedOut
from .inputs import AgainAndAgain, NamedTensors, check_mapping, pairs
from .resource import FleetResource, Watch, colocated, distributed
from .results import Prepared, PublishResult
from .room import SenderRoom
from .verdict import (
    Attempt,
    Verdict,
    prepare_progress,
    prepare_verdict,
    publish_progress,
    publish_verdict,
    serving,
)

log = logging.getLogger(__name__)

VERDICT_SECONDS = 20.0  # how long the operator may take to say what it makes of a failed sending
LOOK_SECONDS = 0.1
SETTLE_SECONDS = 60.0  # for the last agent's last word, when the fleet serves the version already


@dataclass(frozen=True)
class _Goal:
    """What the operator is to come to. undone: what it is called while it is not there."""

    verdict: Callable[[Any, Attempt], Verdict | None]
    progress: Callable[[Any, str], str]
    undone: str


_PUBLISHED = _Goal(publish_verdict, publish_progress, "not served")
_PREPARED = _Goal(prepare_verdict, prepare_progress, "not prepared everywhere")


class Publication:
    """All methods block. Raise PublishRefused, PublishFailed, PublishTimedOut, FleetUnreachable."""

    def __init__(self, resource: FleetResource, asked: Asked) -> None:
        self._resource = resource
        self._asked = asked
        self._asking = Asking(resource, asked)
        self._goal = _PUBLISHED
        self._may_come = False  # the fleet has all that it needs

    def staged(self, room: SenderRoom, named_tensors: NamedTensors) -> PublishResult:
        asked = self._asked
        source = distributed(asked.senders, asked.transfer, asked.transport)
        with self._taking_back():
            found = self._send(room, named_tensors, {"version": asked.version, "source": source})
        return _result(asked, *found)

    def prepared(self, room: SenderRoom, named_tensors: NamedTensors) -> Prepared:
        asked = self._asked
        self._goal = _PREPARED
        source = distributed(asked.senders, "Staged", asked.transport)
        with self._taking_back():
            verdict, report, staged = self._send(
                room, named_tensors, {"prepare": {"version": asked.version, "source": source}}
            )
        return Prepared(asked.version, verdict.root or report.root, report.size, staged, report.deliveries)

    def commit(self) -> PublishResult:
        """What was prepared."""
        with self._taking_back(), self._watching(self._asking.for_prepared) as watch:
            self._may_come = True
            return _result(self._asked, self._verdict(watch), None, 0.0)

    def live(self, room: SenderRoom, named_tensors: AgainAndAgain) -> PublishResult:
        """Direct and Colocated: given to the engines while they are paused."""
        from .live import live_job

        asked = self._asked
        hand_over = asked.transfer == "Colocated"
        source = colocated(asked.senders)
        if not hand_over:
            source = distributed(asked.senders, asked.transfer, asked.transport)
        try:
            work = live_job(
                room,
                asked.version,
                named_tensors,
                colocated=hand_over,
                bucket_bytes=asked.bucket_bytes,
                host=asked.host,
                timeout=asked.timeout,
            )
        except ManifestRefused as error:
            raise PublishRefused(str(error)) from error
        job = room.start(work)
        patch = {"version": asked.version, "source": source}
        try:
            # Taken back while the job still serves: if the decision falls just then, engines get what they were told.
            with self._taking_back(), self._watching(lambda: self._asking.for_new(patch)) as watch:
                self._first_of(job, watch.found)
                if job.done() and (wrong := job.exception()) is not None:
                    raise self._failure(watch, str(wrong), lasting=True)
                return _result(asked, self._verdict(watch), None, 0.0)
        finally:
            job.end()

    def _send(
        self, room: SenderRoom, named_tensors: NamedTensors, patch: dict[str, Any]
    ) -> tuple[Verdict, SendReport, float]:
        """Sends to the agents' stages while the fleet is watched."""
        from ..transfer.outgoing import buckets_of, described

        asked = self._asked
        if isinstance(named_tensors, Mapping):
            check_mapping(named_tensors, described)
        feed = room.feed()
        keeper = room.keeper(asked.transport, asked.host)
        sending = Sending(asked.version, asked.timeout)
        job = room.start(send(room.reception, keeper, sending, feed.stream()))
        try:
            with self._watching(lambda: self._asking.for_new(patch)) as watch:
                try:
                    feed.give(buckets_of(pairs(named_tensors), asked.bucket_bytes), (job, watch.found, asked.halt))
                    report = self._sent(job, watch)
                except ManifestRefused as error:
                    raise self._failure(watch, str(error), lasting=True) from error
                except SendFailed as error:
                    if asked.left() == 0 and not error.lasting:
                        raise self._late() from error
                    reasons = {one.receiver: one.reason for one in error.deliveries}
                    raise self._failure(watch, str(error), lasting=error.lasting, agents=reasons) from error
                except (PublishFailed, PublishTimedOut, FleetUnreachable, Halted):
                    raise
                except Exception:  # of the trainer's own iterator: the operator may say first what it makes of it
                    job.end()
                    self._wait([watch.found], VERDICT_SECONDS)
                    raise
                staged = time.monotonic() - asked.begun
                self._may_come = True
                verdict = self._verdict(watch)
                self._compare(report, verdict)
                return verdict, report, staged
        finally:
            job.end()

    def _sent(self, job: Future[SendReport], watch: Watch) -> SendReport:
        """When all agents that are left have the weights."""
        asked = self._asked
        self._first_of(job, watch.found)
        if not job.done() and watch.found.done() and watch.found.exception() is None:
            verdict = watch.found.result()
            if verdict.outcome == "Failed":
                raise self._failed(verdict)
            if not self._wait([job], min(SETTLE_SECONDS, asked.left())):
                raise self._other_bytes(verdict, "of an earlier attempt, none of its agents has taken these")
        if not job.done() and not self._wait([job], asked.left()):
            raise self._late()
        return job.result()

    def _compare(self, report: SendReport, verdict: Verdict) -> None:
        """The label must mean what was sent. Only the last rank's agents knew the whole."""
        asked = self._asked
        if asked.rank == len(asked.senders) - 1 and verdict.root and verdict.root != report.root:
            raise self._other_bytes(verdict, f"root {verdict.root[:12]}, {report.root[:12]} was sent")

    def _other_bytes(self, verdict: Verdict, what: str) -> PublishFailed:
        version = self._asked.version
        return PublishFailed(
            f"version {version}: the fleet has other bytes by this label ({what}): publish under another label",
            serving=verdict.serving,
        )

    # --- waiting ---

    @contextlib.contextmanager
    def _taking_back(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if self._may_come and isinstance(error, PublishTimedOut | FleetUnreachable):
                raise  # the fleet goes on by itself, and nothing more is needed of this process
            if left := self._asking.take_back():
                log.warning("%s", left)
                if isinstance(error, PublishFailed):
                    error.left = left
                else:
                    error.add_note(left)
            raise

    @contextlib.contextmanager
    def _watching(self, ask: Callable[[], Attempt]) -> Iterator[Watch]:
        try:
            attempt = ask()
        except TimeoutError:
            raise self._late() from None
        others = self._asking.others

        def decide(fleet: Any) -> Verdict | None:
            return self._goal.verdict(fleet, attempt) or (others.taken_back(fleet) if others else None)

        watch = self._resource.watch(decide, self._asked.left())
        try:
            yield watch
        finally:
            watch.stop()

    def _first_of(self, *futures: Future[Any]) -> None:
        """Waits until one of them is done, which a watch is at the deadline."""
        self._wait(futures, self._asked.left() + 1.0)

    def _wait(self, futures: Iterable[Future[Any]], seconds: float) -> bool:
        """Whether one of them is done. Raises Halted."""
        halt, ends = self._asked.halt, time.monotonic() + seconds
        waited = {*futures, halt}
        # In slices: a signal that another thread was given wakes nobody who waits in this one.
        while not (done := wait(waited, LOOK_SECONDS, FIRST_COMPLETED)[0]) and time.monotonic() < ends:
            pass
        if halt in done:
            raise Halted
        return bool(done)

    def _verdict(self, watch: Watch) -> Verdict:
        self._wait([watch.found], self._asked.left() + 1.0)
        try:
            verdict = watch.found.result(0)
        except TimeoutError:
            raise self._late() from None
        if verdict.outcome == "Failed":
            raise self._failed(verdict)
        return verdict

    # --- what went wrong ---

    def _failed(self, verdict: Verdict) -> PublishFailed:
        reasons = {one.name: one.message for one in verdict.engines if one.message}
        return PublishFailed(
            f"version {self._asked.version}: {verdict.sentence}", serving=verdict.serving, engines=reasons
        )

    def _failure(
        self, watch: Watch, sentence: str, *, lasting: bool, agents: Mapping[str, str] | None = None
    ) -> PublishFailed:
        """After the sending failed; what the operator says of it is waited for, it may name the engines."""
        self._wait([watch.found], min(VERDICT_SECONDS, self._asked.left()))
        reasons = {}
        if watch.found.done() and watch.found.exception() is None:
            reasons = {one.name: one.message for one in watch.found.result().engines if one.message}
        return PublishFailed(
            f"version {self._asked.version}: {sentence}",
            serving=serving(self._resource.last),
            engines={**(agents or {}), **reasons},
            lasting=lasting,
        )

    def _late(self) -> PublishTimedOut:
        asked, now = self._asked, self._resource.last
        others = self._asking.others
        if others and not others.asked(now):
            progress = "rank 0 has not asked the fleet for it: was it refused, or does it not send?"
        else:
            progress = self._goal.progress(now, asked.version)
        return PublishTimedOut(
            f"version {asked.version} is {self._goal.undone} after {asked.timeout:.0f} s: {progress}",
            serving=serving(now),
        )


def _result(asked: Asked, verdict: Verdict, report: SendReport | None, staged: float) -> PublishResult:
    return PublishResult(
        version=asked.version,
        root=verdict.root or (report.root if report else ""),
        size=report.size if report else 0,
        transport=report.transport if report else "",
        engines=verdict.engines,
        agents=report.deliveries if report else (),
        staged_seconds=staged,
        stall_seconds=verdict.stall_seconds,
        committed_seconds=time.monotonic() - asked.begun,
    )
