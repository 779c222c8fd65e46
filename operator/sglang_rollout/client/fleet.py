"""A fleet as its trainer and its users see it: publish() gives it other weights, generate() asks it for tokens."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from ..cli.cluster import Cluster
from ..cli.connection import connect
from ..cli.exits import Failure
from ..protocol.pod import address_of
from ..transfer.link import host_port
from ..transfer.session import SessionError
from .errors import FleetUnreachable, PublishRefused
from .generation import Conversation, Generation, Router
from .publication import Asked, NamedTensors, Prepared, Publication, PublishResult, Transfer
from .resource import FleetResource
from .room import SenderRoom
from .verdict import serving

BUCKET_BYTES = 256 << 20
TIMEOUT = 300.0


class RolloutFleet:
    """One SGLangRollout resource. Calls may come from any thread, one publish or prepare at a time."""

    def __init__(self, cluster: Cluster, name: str, *, address: str = "", port: int = 0, router: Router) -> None:
        self.name = name
        self._resource = FleetResource(cluster, name)
        self._address = address
        self._port = port
        self._router = router
        self._room: SenderRoom | None = None

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
        try:
            connection = connect(kubeconfig, context, namespace)
        except Failure as error:
            raise FleetUnreachable(error.message) from error
        cluster = Cluster(connection)
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
        bucket_bytes: int = BUCKET_BYTES,
        timeout: float = TIMEOUT,
        rank: int = 0,
        senders: Sequence[str] = (),
    ) -> PublishResult:
        """Sends the model's tensors, by their checkpoint names and whole, and returns when the fleet serves them.

        named_tensors: a mapping, an iterable of (name, tensor), or a function that gives one; taken in this thread, a
        bucket at a time, always to its end. A tensor must not be written again before this returns. Direct and
        Colocated need a mapping or a function, since they go through it more than once.
        senders, rank: where several ranks send, sender_address of each in the same order everywhere, and this one's
        place; the ranks' tensors add up to the model. Rank 0 asks the fleet.
        Raises PublishRefused for bad input (nothing was changed), PublishFailed, PublishTimedOut, FleetUnreachable."""
        asked = self._asked(version, senders, rank, transfer, transport, bucket_bytes, timeout)
        publication = Publication(self._resource, asked)
        if transfer == "Staged":
            return publication.staged(self._opened(), named_tensors)
        if not isinstance(named_tensors, Mapping) and not callable(named_tensors):
            raise PublishRefused(f"transfer {transfer} needs a mapping of tensors or a function that gives them")
        return publication.live(self._opened(), named_tensors)

    async def apublish(self, version: str, named_tensors: NamedTensors, **options: Any) -> PublishResult:
        """publish() in a thread; the iterator runs there, too."""
        return await asyncio.to_thread(self.publish, version, named_tensors, **options)

    def prepare(
        self,
        version: str,
        named_tensors: NamedTensors,
        *,
        transport: str = "Auto",
        bucket_bytes: int = BUCKET_BYTES,
        timeout: float = TIMEOUT,
        rank: int = 0,
        senders: Sequence[str] = (),
    ) -> Prepared:
        """Stages weights beside the engines while they go on serving the present ones; commit() is then only a pause.
        As publish() otherwise."""
        asked = self._asked(version, senders, rank, "Staged", transport, bucket_bytes, timeout)
        return Publication(self._resource, asked).prepared(self._opened(), named_tensors)

    async def aprepare(self, version: str, named_tensors: NamedTensors, **options: Any) -> Prepared:
        return await asyncio.to_thread(self.prepare, version, named_tensors, **options)

    def commit(self, version: str, *, timeout: float = TIMEOUT) -> PublishResult:
        """Serves what prepare() has staged. Raises as publish() does."""
        asked = Asked(version, (), 0, "Staged", "Auto", BUCKET_BYTES, timeout)
        return Publication(self._resource, asked).commit()

    async def acommit(self, version: str, *, timeout: float = TIMEOUT) -> PublishResult:
        return await asyncio.to_thread(self.commit, version, timeout=timeout)

    def version(self) -> str:
        """What every routable engine serves now."""
        return serving(self._resource.read())

    # --- tokens ---

    def generate(self, **request: Any) -> Generation:
        """prompt or input_ids, sampling: SGLang's sampling_params, timeout in seconds. Never sent twice."""
        return self._router.generate(**request)

    async def agenerate(self, **request: Any) -> Generation:
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

    def _asked(
        self,
        version: str,
        senders: Sequence[str],
        rank: int,
        transfer: Transfer,
        transport: str,
        bucket_bytes: int,
        timeout: float,
    ) -> Asked:
        if bucket_bytes < 1 << 16:
            raise PublishRefused(f"bucket_bytes {bucket_bytes} is too small: use at least 64 KiB, 256 MiB is good")
        if timeout <= 0:
            raise PublishRefused(f"timeout {timeout:g} leaves no time: give seconds")
        listed = list(senders) or [self.sender_address]
        if not 0 <= rank < len(listed):
            raise PublishRefused(f"rank {rank} is none of the {len(listed)} senders")
        if listed[rank] != self.sender_address:
            raise PublishRefused(f"senders[{rank}] is {listed[rank]}, and this rank listens at {self.sender_address}")
        try:
            for one in listed:
                host_port(one)
        except SessionError as error:
            raise PublishRefused(f"senders: {error}") from error
        return Asked(version, listed, rank, transfer, transport, bucket_bytes, timeout, self._address)

    def _opened(self) -> SenderRoom:
        if self._room is None:
            if not self._address:
                raise PublishRefused(
                    "the engines' agents must reach this process, and its address is not known: give address= to "
                    "RolloutFleet.connect(), an address of this host that pods of the cluster can connect to"
                )
            room = SenderRoom()
            try:
                room.open("::" if ":" in self._address else "0.0.0.0", self._port)  # noqa: S104 - agents come from anywhere
            except OSError as error:
                room.close()
                raise PublishRefused(f"port {self._port} cannot be listened on: {error.strerror}") from error
            self._room = room
        return self._room


def own_address(server: str) -> str:
    """By which this host reaches `server`, a URL; "" when that is itself or cannot be told."""
    parts = urlsplit(server)
    try:
        family, kind, _, _, target = socket.getaddrinfo(parts.hostname, parts.port or 443, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing
            found = str(probe.getsockname()[0])
    except OSError:
        return ""
    return "" if found.startswith("127.") or found == "::1" else found
