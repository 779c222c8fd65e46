"""A fleet as its trainer and its users see it: publish() gives it other weights, generate() asks it for tokens."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypedDict, TypeVar, Unpack

from ..kube_access.cluster import Cluster
from ..kube_access.connection import connect
from ..kube_access.failures import Failure
from ..protocol.pod import address_of
from .asking import TIMEOUT, Asked, Halted, Transfer
from .errors import FleetUnreachable, PublishRefused
from .generation import TIMEOUT as ANSWER_SECONDS
from .generation import Conversation, Generation, Router
from .inputs import NamedTensors, check_label, check_senders, check_tensors, check_timeout, check_way
from .publication import Publication
from .resource import FleetResource
from .results import Prepared, PublishResult
from .room import SenderRoom, own_address
from .verdict import serving

log = logging.getLogger(__name__)

FIELD_MANAGER = "sglang-rollout-client"
STOP_SECONDS = 60.0  # for a call whose task was cancelled; it may be in an iterator of the trainer's

T = TypeVar("T")


class SendOptions(TypedDict, total=False):
    """Keywords of prepare()."""

    transport: str
    bucket_bytes: int | None
    timeout: float
    rank: int
    senders: Sequence[str]


class PublishOptions(SendOptions, total=False):
    """Keywords of publish()."""

    transfer: Transfer


class GenerateOptions(TypedDict, total=False):
    """Keywords of generate()."""

    prompt: str | None
    input_ids: Sequence[int] | None
    sampling: Mapping[str, Any] | None
    timeout: float


class RolloutFleet:
    """One SGLangRollout resource. Calls may come from any thread, one publish or prepare at a time."""

    def __init__(self, cluster: Cluster, name: str, *, address: str = "", port: int = 0, router: Router) -> None:
        self.name = name
        self._resource = FleetResource(cluster, name)
        self._address = address
        self._port = port
        self._router = router
        self._room: SenderRoom | None = None
        self._sending = threading.Lock()

    @classmethod
    def connect(
        cls,
        name: str,
        namespace: str | None = None,
        *,
        kubeconfig: str | None = None,
        context: str | None = None,
        address: str = "",
        port: int = 0,
        router_url: str = "",
        api_key: str = "",
    ) -> RolloutFleet:
        """By the kubeconfig, or in a pod by its ServiceAccount. address and port: where the engines' agents reach this
        process; absent, the address by which this host reaches the API server (in a pod: the pod's), and any port.
        router_url: absent, status.router.url, which only resolves in the cluster. Raises FleetUnreachable."""
        if not name or "/" in name:
            raise FleetUnreachable(f"{name!r} is no name of a fleet: give metadata.name of its SGLangRollout")
        try:
            connection = connect(kubeconfig, context, namespace)
        except Failure as error:
            raise FleetUnreachable(error.message) from error
        cluster = Cluster(connection, FIELD_MANAGER)
        resource = FleetResource(cluster, name)
        fleet = cls(cluster, name, address=address, port=port, router=Router(resource.read, router_url, api_key))
        if not address:
            fleet._address = own_address(connection.client.configuration.host)
        return fleet

    # --- weights ---

    @property
    def sender_address(self) -> str:
        """host:port of this rank's sender. Where several ranks send, gather them and give all ranks the list."""
        return address_of(self._address, self._opened().reception.port)

    def publish(
        self,
        version: str,
        named_tensors: NamedTensors,
        *,
        transfer: Transfer = "Staged",
        transport: str = "Auto",
        bucket_bytes: int | None = None,
        timeout: float = TIMEOUT,
        rank: int = 0,
        senders: Sequence[str] = (),
    ) -> PublishResult:
        """Sends the model's tensors, by their checkpoint names and whole, and returns when the fleet serves them.

        version: a label that the fleet has not committed before; one whose attempt came to nothing may be used again.
        named_tensors: a mapping, an iterable of (name, tensor), or a function that gives one; taken in this thread, a
        bucket at a time, always to its end. A tensor must not be written again before this returns. Direct and
        Colocated need a mapping or a function, since they go through it more than once.
        bucket_bytes: of what travels at once, at least 64 KiB; None: 256 MiB from host memory, and from a GPU 1 GiB or
        what a sixteenth of its free memory is, Colocated all at once where half of it is enough.
        timeout: for all of it, in seconds.
        senders, rank: where several ranks send, sender_address of each in the same order everywhere, and this one's
        place; the ranks' tensors add up to the model. Rank 0 asks the fleet.
        Raises PublishRefused for bad input (nothing was changed), PublishFailed, PublishTimedOut, FleetUnreachable.
        Whatever is raised, KeyboardInterrupt too: spec.weights is as it was, unless the fleet has decided to commit."""
        asked = self._asked(
            version,
            transfer=transfer,
            transport=transport,
            bucket_bytes=bucket_bytes,
            timeout=timeout,
            rank=rank,
            senders=senders,
        )
        return self._published(asked, named_tensors)

    async def apublish(
        self, version: str, named_tensors: NamedTensors, **options: Unpack[PublishOptions]
    ) -> PublishResult:
        """publish() in a thread; the iterator runs there, too. When it is cancelled, what it has begun is taken back
        before CancelledError is raised."""
        asked = self._asked(version, **options)
        return await _in_thread(lambda: self._published(asked, named_tensors), asked.halt)

    def prepare(
        self,
        version: str,
        named_tensors: NamedTensors,
        *,
        transport: str = "Auto",
        bucket_bytes: int | None = None,
        timeout: float = TIMEOUT,
        rank: int = 0,
        senders: Sequence[str] = (),
    ) -> Prepared:
        """Stages weights beside the engines while they go on serving the present ones, and returns when every engine
        that takes part has them; commit() is then only a pause. As publish() otherwise. PublishTimedOut names the
        engines that do not have them; those that do keep them, and commit() may be called."""
        asked = self._asked(
            version, transport=transport, bucket_bytes=bucket_bytes, timeout=timeout, rank=rank, senders=senders
        )
        return self._prepared(asked, named_tensors)

    async def aprepare(self, version: str, named_tensors: NamedTensors, **options: Unpack[SendOptions]) -> Prepared:
        """prepare() in a thread, as apublish()."""
        asked = self._asked(version, **options)
        return await _in_thread(lambda: self._prepared(asked, named_tensors), asked.halt)

    def commit(self, version: str, *, timeout: float = TIMEOUT) -> PublishResult:
        """Serves what prepare() has staged. Raises as publish() does; what was prepared stays so."""
        return self._commit(version, timeout, Future())

    async def acommit(self, version: str, *, timeout: float = TIMEOUT) -> PublishResult:
        """commit() in a thread, as apublish()."""
        halt: Future[None] = Future()
        return await _in_thread(lambda: self._commit(version, timeout, halt), halt)

    def version(self) -> str:
        """What every routable engine serves now."""
        return serving(self._resource.read())

    # --- tokens ---

    def generate(
        self,
        *,
        prompt: str | None = None,
        input_ids: Sequence[int] | None = None,
        sampling: Mapping[str, Any] | None = None,
        timeout: float = ANSWER_SECONDS,
    ) -> Generation:
        """prompt or input_ids, sampling: SGLang's sampling_params, timeout in seconds. Never sent twice. Raises
        GenerateFailed, GenerateLost, FleetUnreachable."""
        return self._router.generate(prompt=prompt, input_ids=input_ids, sampling=sampling, timeout=timeout)

    async def agenerate(self, **request: Unpack[GenerateOptions]) -> Generation:
        """As generate()."""
        return await self._router.agenerate(**request)

    def conversation(self, input_ids: Sequence[int] = ()) -> Conversation:
        """Several turns over the same tokens."""
        return Conversation(self._router, list(input_ids))

    def close(self) -> None:
        if self._room is not None:
            self._room.close()
            self._room = None
        self._router.close()

    def __enter__(self) -> RolloutFleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- how ---

    def _published(self, asked: Asked, named_tensors: NamedTensors) -> PublishResult:
        check_tensors(named_tensors, asked.transfer)
        publication = Publication(self._resource, asked)
        with self._alone():
            send = publication.staged if asked.transfer == "Staged" else publication.live
            return send(self._opened(), named_tensors)  # type: ignore[arg-type]

    def _prepared(self, asked: Asked, named_tensors: NamedTensors) -> Prepared:
        check_tensors(named_tensors, asked.transfer)
        with self._alone():
            return Publication(self._resource, asked).prepared(self._opened(), named_tensors)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._sending.acquire(blocking=False):
            raise PublishRefused(f"this process is sending to fleet {self.name} already: one call after the other")
        try:
            yield
        finally:
            self._sending.release()

    def _commit(self, version: str, timeout: float, halt: Future[None]) -> PublishResult:
        check_label(version)
        check_timeout(timeout)
        asked = Asked(version, timeout=timeout, halt=halt)
        return Publication(self._resource, asked).commit()

    def _asked(self, version: str, **options: Unpack[PublishOptions]) -> Asked:
        check_label(version)
        asked = Asked(version, **options)
        check_timeout(asked.timeout)
        check_way(asked.transfer, asked.transport, asked.bucket_bytes)
        senders = list(asked.senders) or [self.sender_address]
        check_senders(senders, asked.rank, self.sender_address)
        return replace(asked, senders=senders, host=self._address)

    def _opened(self) -> SenderRoom:
        if self._room is None:
            self._room = SenderRoom.opened(self._address, self._port)
        return self._room


async def _in_thread(call: Callable[[], T], halt: Future[None]) -> T:
    """halt: ends it early. A cancelled task waits for that end, for a while."""
    work = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        halt.set_result(None)
        done, _ = await asyncio.wait([work], timeout=STOP_SECONDS)
        if not done:
            log.warning("a cancelled call goes on after %.0f s: it is in the trainer's code", STOP_SECONDS)
        elif (error := work.exception()) is not None and not isinstance(error, Halted):
            log.warning("a call was cancelled, and had failed: %s", error)
        raise
