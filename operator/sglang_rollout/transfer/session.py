"""What a trainer's sender and an agent say to each other, as small JSON frames (link.py sends them). Bytes of weights
travel beside them (transports/), or as a frame's blob.

Staged: Hello, Welcome, Joined, then for each bucket Bucket, Ready, Go, Took, at last End, Sealed. Where agents pull, Go
does not wait for Ready. A Welcome in between is a new group in place of one that lost a member. Standard library only:
the agent needs no torch to speak."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from .manifest import Bucket, ManifestRefused, tensor_of

RELEASE = 1
MAX_JSON = 64 << 20
MAX_BLOB = 16 << 30
MAX_WORD = 1 << 20  # of anything that an agent says

_MAGIC = b"SGR1"
HEADER = struct.Struct(">4sIQ")


class SessionError(Exception):
    """The conversation cannot go on; the sentence says why."""


class LinkLost(SessionError):
    """The peer is gone, stands still, or what it sent was none of our frames."""


@dataclass(frozen=True)
class Message:
    """`kind` names it on the wire. Fields are str, int, float, bool, and lists and dicts of them."""

    kind: ClassVar[str] = ""


@dataclass(frozen=True)
class Hello(Message):
    """The agent's first word. receiver: pod name. members: how many agents the sender will hear from. ranks: TP size.
    mode: "staged", "direct" or "colocated". offers: transport -> what it needs to know of this side. digests: the
    algorithms that this side can compute, best first. groups: ids of transfer groups that it still has."""

    kind: ClassVar[str] = "hello"
    transaction: str
    version: str
    receiver: str
    members: int = 1
    epoch: int = 0
    ranks: int = 1
    mode: str = "staged"
    offers: dict[str, dict[str, str]] = field(default_factory=dict)
    digests: list[str] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    release: int = RELEASE


@dataclass(frozen=True)
class Welcome(Message):
    """rank and world of the agent in the transfer group `group`; details: where and how to join it. A group that the
    agent said it still has is used again."""

    kind: ClassVar[str] = "welcome"
    transport: str
    group: str
    rank: int
    world: int
    digest: str
    details: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Joined(Message):
    kind: ClassVar[str] = "joined"
    group: str


@dataclass(frozen=True)
class Unable(Message):
    """The group cannot be joined, or broke. The sender makes another one, perhaps with another transport."""

    kind: ClassVar[str] = "unable"
    group: str
    reason: str


@dataclass(frozen=True)
class Announced(Message):
    """A bucket that comes next. tensors: [name, dtype, shape] as in a manifest."""

    kind: ClassVar[str] = "bucket"
    number: int
    tensors: list[list[Any]]
    digest: str
    details: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, number: int, bucket: Bucket, details: Mapping[str, str] | None = None) -> Announced:
        tensors = [[t.name, t.dtype, list(t.shape)] for t in bucket.tensors]
        return cls(number, tensors, bucket.digest, dict(details or {}))

    def bucket(self) -> Bucket:
        """Raises ManifestRefused for tensors that cannot be."""
        if not all(isinstance(words, list) and len(words) == 3 for words in self.tensors):
            raise ManifestRefused(f"bucket {self.number} lists something that is no [name, dtype, shape]")
        return Bucket(tuple(tensor_of(*words) for words in self.tensors), self.digest)


@dataclass(frozen=True)
class Ready(Message):
    """group: in which it is ready, since a bucket may be sent again in another."""

    kind: ClassVar[str] = "ready"
    number: int
    group: str = ""


@dataclass(frozen=True)
class Go(Message):
    """Every agent is ready: take the bucket's bytes now."""

    kind: ClassVar[str] = "go"
    number: int


@dataclass(frozen=True)
class Took(Message):
    """The bucket's bytes are here, so that the sender needs no longer keep them. That they are equal to its digest may
    be found out later, and is once this side has sealed. group as in Ready."""

    kind: ClassVar[str] = "ok"
    number: int
    group: str = ""


@dataclass(frozen=True)
class Refused(Message):
    """lasting: what was sent is wrong, and sending it again would not help. number: of the bucket, -1 for the whole."""

    kind: ClassVar[str] = "refused"
    reason: str
    number: int = -1
    lasting: bool = False


@dataclass(frozen=True)
class End(Message):
    """All buckets of this sender were sent. root: of the manifest of its buckets alone."""

    kind: ClassVar[str] = "end"
    root: str
    aliases: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Sealed(Message):
    """root: of everything that the agent staged, this sender's buckets and those of the senders before it."""

    kind: ClassVar[str] = "sealed"
    root: str
    nonfinite: int = 0


@dataclass(frozen=True)
class Cancel(Message):
    """The sender gives up, or refuses this agent. lasting as in Refused."""

    kind: ClassVar[str] = "cancel"
    reason: str
    lasting: bool = False


@dataclass(frozen=True)
class Contents(Message):
    """Direct and Colocated: all that will come, before anything moves. manifest: its JSON."""

    kind: ClassVar[str] = "contents"
    manifest: str


@dataclass(frozen=True)
class Next(Message):
    """Direct and Colocated: the agent asks for bucket `number`, when the engine is ready for it."""

    kind: ClassVar[str] = "next"
    number: int
    details: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Payload(Message):
    """The answer to Next; the blob has what does not fit into words."""

    kind: ClassVar[str] = "payload"
    number: int
    details: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Beat(Message):
    kind: ClassVar[str] = "beat"


_KINDS: dict[str, type[Message]] = {
    cls.kind: cls
    for cls in (
        Hello, Welcome, Joined, Unable, Announced, Ready, Go, Took, Refused, End, Sealed, Cancel, Contents, Next,
        Payload, Beat,
    )
}  # fmt: skip
_TYPES: dict[str, type] = {"str": str, "int": int, "bool": bool, "float": float, "list": list, "dict": dict}


def encode(message: Message, blob_size: int = 0) -> bytes:
    """The frame without its blob."""
    body = json.dumps({"kind": message.kind, **vars(message)}, separators=(",", ":")).encode()
    if len(body) > MAX_JSON:
        raise SessionError(f"a {message.kind} of {len(body)} bytes is more than the limit of {MAX_JSON}")
    return HEADER.pack(_MAGIC, len(body), blob_size) + body


def decode_header(header: bytes, largest: tuple[int, int] = (MAX_JSON, MAX_BLOB)) -> tuple[int, int]:
    """Sizes of JSON and blob. Raises LinkLost, also for one that is more than the `largest`."""
    magic, size, blob = HEADER.unpack(header)
    if magic != _MAGIC:
        raise LinkLost(f"the peer speaks something else: it began a frame with {magic!r}")
    if size > largest[0] or blob > largest[1]:
        raise LinkLost(f"the peer announced a frame of {size} + {blob} bytes, more than {largest[0]} + {largest[1]}")
    return size, blob


def decode(body: bytes) -> Message:
    """Unknown fields are left out, those of a later release. Raises LinkLost."""
    try:
        value = json.loads(body)
        cls = _KINDS[value.pop("kind")]
        known = {f.name: value[f.name] for f in fields(cls) if f.name in value}
        for f in fields(cls):
            if f.name in known and not _fits(known[f.name], str(f.type)):
                raise TypeError(f"{f.name} is no {f.type}")
        return cls(**known)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LinkLost(f"the peer sent a frame that is none of ours: {error!r}") from error


def _fits(value: Any, wanted: str) -> bool:
    """Whether a JSON value is of a type as the messages' fields are annotated: keys of a dict are strings anyway."""
    if wanted == "Any":
        return True
    base, _, inner = wanted.removesuffix("]").partition("[")
    if type(value) is not _TYPES[base]:
        return False
    if isinstance(value, dict):
        return all(_fits(item, inner.partition(", ")[2]) for item in value.values())
    return not isinstance(value, list) or all(_fits(item, inner) for item in value)
