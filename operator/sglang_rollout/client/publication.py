"""One version on its way into a fleet: the resource asks for it, this process sends it, and what the operator makes of
it is watched meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Literal

from ..transfer.manifest import ManifestRefused
from ..transfer.sender import Delivery, SendFailed, Sending, SendReport, send
from .errors import FleetUnreachable, PublishFailed, PublishRefused, PublishTimedOut
from .resource import FleetResource, Watch, as_it_was, colocated, distributed
from .room import SenderRoom
from .verdict import NOT_OURS, EngineOutcome, Verdict, prepare_verdict, progress, publish_verdict, serving

VERDICT_SECONDS = 20.0  # how long the operator may take to say what it makes of a failed sending

AgainAndAgain = Mapping[str, Any] | Callable[[], Iterable[tuple[str, Any]]]
NamedTensors = AgainAndAgain | Iterable[tuple[str, Any]]
Transfer = Literal["Staged", "Direct", "Colocated"]
Decide = Callable[[Any, int], Verdict | None]
Ask = Callable[[Any], dict[str, Any]]


@dataclass(frozen=True)
class PublishResult:
    """root: digest of the weights, the same on every engine. agents: how each got them; one that was lost has caught up
    or will, before it serves. Seconds: until all agents had the weights, that an engine stood still at most, until the
    fleet served them; the first and the last since publish() was called. size in bytes, of this rank's tensors."""

    version: str
    root: str
    size: int
    transport: str
    engines: tuple[EngineOutcome, ...]
    agents: tuple[Delivery, ...]
    staged_seconds: float
    stall_seconds: float
    committed_seconds: float


@dataclass(frozen=True)
class Prepared:
    """Weights that are staged and not served yet: commit() them."""

    version: str
    root: str
    size: int
    staged_seconds: float


@dataclass
class Asked:
    """What one call wants. host: this rank's address as agents reach it."""

    version: str
    senders: Sequence[str]
    rank: int
    transfer: Transfer
    transport: str
    bucket_bytes: int
    timeout: float
    host: str = ""
    begun: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        return max(0.0, self.begun + self.timeout - time.monotonic())


class Publication:
    """All methods block. Raise PublishRefused, PublishFailed, PublishTimedOut, FleetUnreachable."""

    def __init__(self, resource: FleetResource, asked: Asked) -> None:
        self._resource = resource
        self._asked = asked
        self._before: Any = {}

    def staged(self, room: SenderRoom, named_tensors: NamedTensors) -> PublishResult:
        asked = self._asked
        source = distributed(asked.senders, asked.transfer, asked.transport)

        def ask(_: Any) -> dict[str, Any]:
            return {"version": asked.version, "source": source}

        report, verdict, staged = self._send(room, named_tensors, ask, self._published)
        return _result(asked, verdict, report, staged)

    def prepared(self, room: SenderRoom, named_tensors: NamedTensors) -> Prepared:
        asked = self._asked
        source = distributed(asked.senders, "Staged", asked.transport)

        def ask(_: Any) -> dict[str, Any]:
            return {"prepare": {"version": asked.version, "source": source}}

        def decide(fleet: Any, generation: int) -> Verdict | None:
            return prepare_verdict(fleet, asked.version, generation)

        report, verdict, staged = self._send(room, named_tensors, ask, decide)
        return Prepared(asked.version, verdict.root or report.root, report.size, staged)

    def commit(self) -> PublishResult:
        """What was prepared."""
        asked = self._asked

        def ask(fleet: Any) -> dict[str, Any]:
            prepared = (fleet["spec"].get("weights") or {}).get("prepare") or {}
            if prepared.get("version") != asked.version:
                told = prepared.get("version") or "nothing"
                raise PublishRefused(f"version {asked.version} is not prepared, {told} is: call prepare() first")
            members = {"disk": None, "distributed": None, "colocated": None}
            # It is no longer ahead of anything, and must not be asked for again when yet another version serves.
            return {"version": asked.version, "source": {**members, **prepared["source"]}, "prepare": None}

        watch = self._ask_and_watch(ask, self._published)
        try:
            return _result(asked, self._verdict(watch), None, 0.0)
        finally:
            watch.stop()

    def live(self, room: SenderRoom, named_tensors: AgainAndAgain) -> PublishResult:
        """Direct and Colocated: given to the engines while they are paused."""
        from .live import live_job

        asked = self._asked
        hand_over = asked.transfer == "Colocated"
        source = colocated(asked.senders)
        if not hand_over:
            source = distributed(asked.senders, asked.transfer, asked.transport)
        try:
            job = room.start(
                live_job(
                    room,
                    asked.version,
                    named_tensors,
                    colocated=hand_over,
                    bucket_bytes=asked.bucket_bytes,
                    host=asked.host,
                    timeout=asked.timeout,
                )
            )
        except ManifestRefused as error:
            raise PublishRefused(str(error)) from error
        watch: Watch | None = None
        try:
            watch = self._ask_and_watch(lambda _: {"version": asked.version, "source": source}, self._published)
            while not watch.found.done() and not job.done():
                time.sleep(0.02)
            if job.done() and (wrong := job.exception()) is not None:
                raise self._failure(watch, str(wrong), lasting=True)
            return _result(asked, self._verdict(watch), None, 0.0)
        finally:
            job.cancel()
            if watch is not None:
                watch.stop()

    def _published(self, fleet: Any, generation: int) -> Verdict | None:
        return publish_verdict(fleet, self._asked.version, generation)

    def _send(
        self,
        room: SenderRoom,
        named_tensors: NamedTensors,
        ask: Ask,
        decide: Decide,
    ) -> tuple[SendReport, Verdict, float]:
        """Sends to the agents' stages while the fleet is watched."""
        from ..transfer.outgoing import buckets_of, described

        asked = self._asked
        if isinstance(named_tensors, Mapping):
            _look_at(named_tensors, described)
        feed = room.feed()
        keeper = room.keeper(asked.transport, asked.host)
        sending = Sending(asked.version, asked.timeout)
        job: Future[SendReport] = room.start(send(room.reception, keeper, sending, feed.stream()))
        watch: Watch | None = None
        try:
            watch = self._ask_and_watch(ask, decide)
            try:
                feed.give(buckets_of(_pairs(named_tensors), asked.bucket_bytes), (job, watch.found))
                while not job.done() and not watch.found.done():
                    time.sleep(0.01)
                if not job.done() and watch.found.exception() is None and watch.found.result().outcome == "Failed":
                    raise self._failed(watch.found.result())
                report = job.result(asked.left())
            except ManifestRefused as error:
                raise self._failure(watch, str(error), lasting=True) from error
            except SendFailed as error:
                if asked.left() == 0 and not error.lasting:
                    self._take_back()
                    raise self._late() from error
                reasons = {one.receiver: one.reason for one in error.deliveries}
                raise self._failure(watch, str(error), lasting=error.lasting, agents=reasons) from error
            except PublishFailed:
                raise
            except TimeoutError:
                self._take_back()
                raise self._late() from None
            except BaseException as error:  # of the trainer's own iterator, or it is being stopped
                job.cancel()
                if isinstance(error, Exception):
                    wait([watch.found], VERDICT_SECONDS)
                self._take_back()
                raise
            staged = time.monotonic() - asked.begun
            return report, self._verdict(watch), staged
        finally:
            job.cancel()
            if watch is not None:
                watch.stop()

    def _ask_and_watch(self, ask: Ask, decide: Decide) -> Watch:
        asked = self._asked
        generation = 0
        if asked.rank == 0:

            def weights(fleet: Any) -> dict[str, Any]:
                self._before = fleet["spec"].get("weights") or {}
                return ask(fleet)

            generation = self._resource.ask_for(asked.version, weights)["metadata"]["generation"]
        else:
            generation = NOT_OURS  # somebody else's version is no answer before rank 0 has asked
        return self._resource.watch(lambda fleet: decide(fleet, generation), asked.left())

    def _verdict(self, watch: Watch) -> Verdict:
        try:
            verdict = watch.found.result(self._asked.left() + 1.0)
        except TimeoutError:
            raise self._late() from None
        if verdict.outcome == "Failed":
            raise self._failed(verdict)
        return verdict

    def _failed(self, verdict: Verdict) -> PublishFailed:
        self._take_back()
        reasons = {one.name: one.message for one in verdict.engines if one.message}
        return PublishFailed(
            f"version {self._asked.version}: {verdict.sentence}", serving=verdict.serving, engines=reasons
        )

    def _failure(
        self, watch: Watch, sentence: str, *, lasting: bool, agents: Mapping[str, str] | None = None
    ) -> PublishFailed:
        """After the sending failed; what the operator says of it is waited for, it may name the engines."""
        try:
            verdict = watch.found.result(min(VERDICT_SECONDS, self._asked.left()))
            reasons = {one.name: one.message for one in verdict.engines if one.message}
        except (TimeoutError, FleetUnreachable):
            reasons = {}
        self._take_back()
        now = serving(self._resource.last)
        return PublishFailed(
            f"version {self._asked.version}: {sentence}",
            serving=now,
            engines={**(agents or {}), **reasons},
            lasting=lasting,
        )

    def _late(self) -> PublishTimedOut:
        asked = self._asked
        return PublishTimedOut(
            f"version {asked.version} is not served after {asked.timeout:.0f} s: {progress(self._resource.last)}",
            serving=serving(self._resource.last),
        )

    def _take_back(self) -> None:
        """Nobody holds the version: the fleet would ask this trainer for it again and again."""
        asked = self._asked
        if asked.rank != 0:
            return

        def weights(fleet: Any) -> dict[str, Any]:
            now = fleet["spec"].get("weights") or {}
            transaction = ((fleet.get("status") or {}).get("weights") or {}).get("transaction") or {}
            if (now.get("prepare") or {}).get("version") == asked.version and now.get("version") != asked.version:
                return {"prepare": None}
            decided = transaction.get("version") == asked.version and transaction.get("decision") == "Commit"
            if now.get("version") != asked.version or decided:
                raise PublishRefused("it is not ours any more")
            return as_it_was(self._before)

        try:
            self._resource.ask_for(asked.version, weights, known=True)
        except (PublishRefused, FleetUnreachable):
            return  # what failed is told; the operator goes on trying, which harms nothing


def _look_at(named_tensors: Mapping[str, Any], described: Callable[[str, Any], object]) -> None:
    """What can be told before the fleet is asked. Raises PublishRefused."""
    if not named_tensors:
        raise PublishRefused("there are no tensors: give all tensors of the model")
    try:
        for name, tensor in named_tensors.items():
            described(name, tensor)
    except ManifestRefused as error:
        raise PublishRefused(str(error)) from error


def _pairs(named_tensors: NamedTensors) -> Iterable[tuple[str, Any]]:
    if isinstance(named_tensors, Mapping):
        return named_tensors.items()
    return named_tensors() if callable(named_tensors) else named_tensors


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
